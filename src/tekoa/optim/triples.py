"""Bridges between init/update/get_params triples and optax transformations.

Either family then runs in every loop: `from_triple` takes an old optimizer into an optax
chain, `to_triple` takes an optax one into a loop written by hand.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import trees
from tekoa.optim import packed


class FromTripleState(NamedTuple):
    """What a triple remembers, without the parameters, which optax passes in."""

    count: Any  # Completed updates, an int32 array: the step index of the next one.
    slots: Any  # A tuple of trees like the parameters, one for each slot.


def from_triple(triple: packed.Optimizer) -> optax.GradientTransformation:
    """Makes an optax transformation of an init/update/get_params triple.

    The triple starts each step from the parameters that `update` is given, whatever the
    rest of a chain does to them. For a triple made by `packed.optimizer` (all of
    `classic`) the state has no copy of them. A triple of another make keeps its own copy
    and goes on from that one: let nothing in the chain come after it.
    Its parameters are float32 where the model's are a smaller float.

    Args:
        triple: `init_fn`, `update_fn` and `params_fn`; a plain tuple will do.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: By `update`, if it is not given the parameters.

    >>> from tekoa.optim import classic
    >>> tx = optax.chain(optax.clip(1.0), from_triple(classic.momentum(0.5, mass=0.9)))
    >>> params = {'w': jnp.float32(1.0)}
    >>> updates, state = tx.update({'w': jnp.float32(8.0)}, tx.init(params), params)
    >>> updates
    {'w': Array(-0.5, dtype=float32)}
    """
    triple = packed.Optimizer(*triple)

    def init(params: trees.PyTree) -> FromTripleState:
        opt_state = triple.init_fn(jax.tree.map(_start, params))
        return FromTripleState(jnp.zeros((), jnp.int32), _slots(triple, opt_state))

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, FromTripleState]:
        if params is None:
            raise ValueError("A triple needs the parameters: call update(grads, state, params).")
        old = jax.tree.map(trees.widen, params)
        # A new function each time: JAX takes dataclasses with the same fields for equal, and
        # would at times give the cached structure of another one.
        template = jax.eval_shape(lambda params: triple.init_fn(params), old)  # noqa: PLW0108
        opt_state = _opt_state(triple, template, state.slots, old)
        opt_state = triple.update_fn(state.count, jax.tree.map(trees.widen, updates), opt_state)
        new = triple.params_fn(opt_state)
        steps = jax.tree.map(lambda g, a, b: (a - b).astype(jnp.result_type(g)), updates, new, old)
        count = optax.safe_increment(state.count)
        return steps, FromTripleState(count, _slots(triple, opt_state))

    return optax.GradientTransformation(init, update)


def _start(param: Any) -> jax.Array:
    """A parameter to make slots of; optax's optimizers too take one that is only a shape."""
    is_shape = isinstance(param, jax.ShapeDtypeStruct)
    return trees.widen(jnp.zeros_like(param) if is_shape else param)


def _slots(triple: packed.Optimizer, opt_state: Any) -> Any:
    """Turns each parameter's tuple of slots into a tuple of trees of slots.

    Such trees look like the parameters, so that optax's tools and sharding rules find
    their way in them. The parameters themselves are left out.
    """
    columns = _slot_columns(triple, opt_state)
    if columns is None:
        return opt_state
    rows = [_children(state)[0] for state in _own_states(opt_state)]
    return tuple(opt_state.tree_def.unflatten([row[j] for row in rows]) for j in columns)


def _opt_state(triple: packed.Optimizer, template: Any, slots: Any, params: trees.PyTree) -> Any:
    """Undoes `_slots`, with these parameters; `template` has the shapes of the result."""
    columns = _slot_columns(triple, template)
    if columns is None:
        return slots
    values = {j: template.tree_def.flatten_up_to(x) for j, x in zip(columns, slots, strict=True)}
    packed_state = []
    for k, (state, param) in enumerate(
        zip(_own_states(template), jax.tree.leaves(params), strict=True)
    ):
        shapes, structure = _children(state)
        row = [values[j][k] if j in values else param for j in range(len(shapes))]
        packed_state.append(jax.tree.leaves(structure.unflatten(row)))
    return template._replace(packed_state=tuple(packed_state))


def _slot_columns(triple: packed.Optimizer, opt_state: Any) -> list[int] | None:
    """Finds which parts of a parameter's state are slots; None for a foreign state."""
    if getattr(opt_state, "_fields", ()) != packed.OptimizerState._fields:
        return None
    if not opt_state.packed_state:  # No parameters: those of any one are alike.
        opt_state = jax.eval_shape(triple.init_fn, np.float32(0))
    own_states = _own_states(opt_state)
    # What get_params hands out unchanged is the parameter.
    marks = [jax.tree.map(lambda _: _Mark(), state) for state in own_states]
    marked = opt_state._replace(packed_state=tuple(map(jax.tree.leaves, marks)))
    try:
        params = jax.tree.leaves(triple.params_fn(marked))
    except (TypeError, AttributeError):
        return None
    columns = [
        [j for j, child in enumerate(_children(mark)[0]) if child is not param]
        for mark, param in zip(marks, params, strict=True)
    ]
    n_parts = {len(_children(mark)[0]) for mark in marks}
    is_regular = len(n_parts) == 1 and all(c == columns[0] for c in columns)
    return columns[0] if is_regular and len(columns[0]) == n_parts.pop() - 1 else None


class _Mark:
    """Stands for an array, to see where it goes."""


def _own_states(opt_state: Any) -> list[Any]:
    pairs = zip(opt_state.subtree_defs, opt_state.packed_state, strict=True)
    return [subtree_def.unflatten(leaves) for subtree_def, leaves in pairs]


def _children(tree: trees.PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)


class ToTripleState(NamedTuple):
    """The state of a triple made from an optax transformation."""

    params: trees.PyTree  # A copy of the parameters: a second one, if the loop keeps its own.
    inner: Any  # The transformation's own state.


def to_triple(tx: optax.GradientTransformation) -> packed.Optimizer:
    """Makes an init/update/get_params triple of an optax transformation.

    The state holds the parameters; a loop that keeps them as well holds two copies. The
    step given to `update_fn` is not used: the transformation counts its own updates.

    Args:
        tx: Any transformation. One that needs more than gradients and parameters (LBFGS:
            value, grad, value_fn) gets it by keyword:
            `update_fn(step, grads, opt_state, value=..., ...)`.

    Returns:
        The triple; its `update_fn` raises TypeError if the gradients have another
        structure than the parameters, or if such a keyword is missing.

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
        _check_gradients(grads, opt_state.params)
        try:
            updates, inner = tx.update(grads, opt_state.inner, opt_state.params, **extra_args)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                f"This transformation needs more than gradients and parameters: {error}. "
                "Pass it by keyword: update_fn(step, grads, opt_state, value=..., ...)."
            ) from error
        return ToTripleState(optax.apply_updates(opt_state.params, updates), inner)

    return packed.Optimizer(init_fn, update_fn, lambda opt_state: opt_state.params)


def _strongly_typed(x: Any) -> Any:
    # optax.lbfgs starts with weakly typed numbers, which would compile the step twice.
    return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x


def _check_gradients(grads: trees.PyTree, params: trees.PyTree) -> None:
    expected, seen = jax.tree.structure(params), jax.tree.structure(grads)
    if expected != seen:
        raise TypeError(
            "The gradients do not have the structure of the parameters that the optimizer was "
            f"initialized with: parameters {expected}, gradients {seen}."
        )
