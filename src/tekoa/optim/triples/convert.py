"""Conversion between init/update/get_params triples and optax transformations.

`from_triple` makes a classic optimizer usable in an optax chain; `to_triple` makes an optax
transformation usable in a hand-written loop.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import trees
from tekoa.optim.triples import packed


class FromTripleState(NamedTuple):
    """The state of a triple without the parameters, which optax passes to `update`."""

    count: Any  # Completed updates, an int32 array: the step index of the next one.
    slots: Any  # A tuple of trees like the parameters, one per slot.


def from_triple(triple: packed.Optimizer) -> optax.GradientTransformation:
    """Creates an optax transformation from an init/update/get_params triple.

    Each step starts from the `params` passed to `update`, whatever else a chain does to
    them. For triples created by `packed.optimizer` (all of `classic`) the state holds no copy
    of the parameters. Any other triple keeps its own copy and continues from that one, so it
    must be the last transformation of a chain. The triple sees float32 parameters if those
    of the model are a smaller float.

    Args:
        triple: `init_fn`, `update_fn` and `params_fn`; may be a plain tuple.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: From `update`, if `params` is missing.

    >>> from tekoa.optim import classic
    >>> tx = optax.chain(optax.clip(1.0), from_triple(classic.momentum(0.5, mass=0.9)))
    >>> params = {'w': jnp.float32(1.0)}
    >>> updates, state = tx.update({'w': jnp.float32(8.0)}, tx.init(params), params)
    >>> updates
    {'w': Array(-0.5, dtype=float32)}
    """
    triple = packed.Optimizer(*triple)

    def init(params: trees.PyTree) -> FromTripleState:
        opt_state = triple.init_fn(jax.tree.map(_as_array, params))
        return FromTripleState(jnp.zeros((), jnp.int32), _to_slots(triple, opt_state))

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, FromTripleState]:
        if params is None:
            raise ValueError("A triple needs params: call update(grads, state, params).")
        old = jax.tree.map(trees.widen, params)
        # A new function each time: JAX considers dataclasses with the same fields equal and
        # could otherwise return the cached structure of a different one.
        template = jax.eval_shape(lambda params: triple.init_fn(params), old)  # noqa: PLW0108
        opt_state = _from_slots(triple, template, state.slots, old)
        opt_state = triple.update_fn(state.count, jax.tree.map(trees.widen, updates), opt_state)
        new = triple.params_fn(opt_state)
        steps = jax.tree.map(lambda g, a, b: (a - b).astype(jnp.result_type(g)), updates, new, old)
        count = optax.safe_increment(state.count)
        return steps, FromTripleState(count, _to_slots(triple, opt_state))

    return optax.GradientTransformation(init, update)


def _as_array(param: Any) -> jax.Array:
    """Returns a parameter as an array; like optax, `init` also accepts shapes."""
    is_shape = isinstance(param, jax.ShapeDtypeStruct)
    return trees.widen(jnp.zeros_like(param) if is_shape else param)


def _to_slots(triple: packed.Optimizer, opt_state: Any) -> Any:
    """Converts each parameter's tuple of slots to a tuple of trees, one per slot.

    The trees have the structure of the parameters, so that optax's tools and sharding rules
    work on them. The parameters themselves are omitted.
    """
    columns = _slot_columns(triple, opt_state)
    if columns is None:
        return opt_state
    rows = [_children(state)[0] for state in packed.param_states(opt_state)]
    return tuple(opt_state.tree_def.unflatten([row[j] for row in rows]) for j in columns)


def _from_slots(triple: packed.Optimizer, template: Any, slots: Any, params: trees.PyTree) -> Any:
    """Undoes `_to_slots` with these parameters; `template` has the shapes of the result."""
    columns = _slot_columns(triple, template)
    if columns is None:
        return slots
    values = {j: template.tree_def.flatten_up_to(x) for j, x in zip(columns, slots, strict=True)}
    packed_state = []
    for k, (state, param) in enumerate(
        zip(packed.param_states(template), jax.tree.leaves(params), strict=True)
    ):
        shapes, structure = _children(state)
        row = [values[j][k] if j in values else param for j in range(len(shapes))]
        packed_state.append(jax.tree.leaves(structure.unflatten(row)))
    return template._replace(packed_state=tuple(packed_state))


def _slot_columns(triple: packed.Optimizer, opt_state: Any) -> list[int] | None:
    """Finds which children of a parameter's state are slots; None for a foreign state."""
    if getattr(opt_state, "_fields", ()) != packed.OptimizerState._fields:
        return None
    if not opt_state.packed_state:  # Without parameters: the columns are those of any other.
        opt_state = jax.eval_shape(triple.init_fn, np.float32(0))
    # The child that get_params returns unchanged is the parameter.
    param_states = packed.param_states(opt_state)
    marks = [jax.tree.map(lambda _: _Mark(), state) for state in param_states]
    marked = opt_state._replace(packed_state=tuple(map(jax.tree.leaves, marks)))
    try:
        params = jax.tree.leaves(triple.params_fn(marked))
    except (TypeError, AttributeError):
        return None
    columns = [
        [j for j, child in enumerate(_children(mark)[0]) if child is not param]
        for mark, param in zip(marks, params, strict=True)
    ]
    n_children = {len(_children(mark)[0]) for mark in marks}
    is_regular = len(n_children) == 1 and all(c == columns[0] for c in columns)
    return columns[0] if is_regular and len(columns[0]) == n_children.pop() - 1 else None


class _Mark:
    """Stands in for an array, to trace where it ends up."""


def _children(tree: trees.PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)


class ToTripleState(NamedTuple):
    """The state of a triple created from an optax transformation."""

    params: trees.PyTree  # A copy of the parameters.
    inner: Any  # The transformation's own state.


def to_triple(tx: optax.GradientTransformation) -> packed.Optimizer:
    """Creates an init/update/get_params triple from an optax transformation.

    The state holds the parameters, so a loop that also keeps them holds two copies. The
    step passed to `update_fn` is ignored: the transformation counts its own updates.

    Args:
        tx: Any transformation. If it needs extra arguments, like LBFGS (value, grad,
            value_fn), pass them by keyword: `update_fn(step, grads, opt_state, value=...)`.

    Returns:
        The triple. Its `update_fn` raises TypeError if the gradients do not have the
        structure of the parameters, or if an extra argument is missing.

    >>> init, update, get_params = to_triple(optax.sgd(0.5))
    >>> float(get_params(update(0, 2.0, init(1.0))))
    0.0
    """
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: trees.PyTree) -> ToTripleState:
        params = jax.tree.map(jnp.asarray, params)
        return jax.tree.map(_strongly_typed, ToTripleState(params, tx.init(params)))

    def update_fn(
        step: Any, grads: trees.PyTree, opt_state: ToTripleState, **extra_args: Any
    ) -> ToTripleState:
        del step
        packed.gradient_leaves(grads, jax.tree.structure(opt_state.params))
        try:
            updates, inner = tx.update(grads, opt_state.inner, opt_state.params, **extra_args)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                f"This transformation needs more than gradients and parameters: {error}. "
                "Pass them by keyword: update_fn(step, grads, opt_state, value=..., ...)."
            ) from error
        return ToTripleState(optax.apply_updates(opt_state.params, updates), inner)

    return packed.Optimizer(init_fn, update_fn, lambda opt_state: opt_state.params)


def _strongly_typed(x: Any) -> Any:
    # optax.lbfgs starts with weakly typed numbers, which would compile the step twice.
    return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x
