"""Makes optimizers for one array work on trees, and their state fit for saving.

An `Optimizer` is a triple of functions, the way of early JAX:
`init_fn(params) -> opt_state`, `update_fn(step, grads, opt_state) -> opt_state` and
`params_fn(opt_state) -> params`. The step counts from 0. The state holds the parameters,
so a loop that also keeps them elsewhere has two copies.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import trees


class Optimizer(NamedTuple):
    """The three functions of an optimizer."""

    init_fn: Callable[[trees.PyTree], Any]  # params -> opt_state
    update_fn: Callable[..., Any]  # step, grads, opt_state -> opt_state
    params_fn: Callable[[Any], trees.PyTree]  # opt_state -> params


@jax.tree_util.register_pytree_with_keys_class
class OptimizerState(NamedTuple):
    """The state of every optimizer made by `optimizer`; only arrays are its leaves."""

    packed_state: tuple[list[Any], ...]  # For each parameter, the leaves of its own state.
    tree_def: Any  # Structure of the parameters.
    subtree_defs: tuple[Any, ...]  # For each parameter, the structure of its own state.

    def tree_flatten_with_keys(self) -> tuple[tuple[Any], tuple[Any, Any]]:
        """Splits arrays from structure, as JAX asks."""
        key = jax.tree_util.GetAttrKey("packed_state")
        return ((key, self.packed_state),), (self.tree_def, self.subtree_defs)

    @classmethod
    def tree_unflatten(cls, structure: tuple[Any, Any], children: tuple[Any]) -> "OptimizerState":
        """Joins them again."""
        return cls(children[0], *structure)


def optimizer(make: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Optimizer]:
    """Turns a maker of per-array functions into a maker of an `Optimizer` of trees.

    Args:
        make: Returns `init(x)`, `update(step, g, state)` and `get_params(state)`, all for
            one array; `state` may be any tree of arrays. A static fact about the array
            must not be put in it: it would become a traced array under `jit`.

    Returns:
        A function of `make`'s arguments. The `update_fn` it gives raises TypeError if the
        gradients have another structure than the parameters, or if `update` changes the
        structure or the shapes of its state; it shows both.

    >>> @optimizer
    ... def descend(rate):
    ...     return lambda x: x, lambda i, g, x: x - rate * g, lambda x: x
    >>> init, update, get_params = descend(0.5)
    >>> get_params(update(0, {'w': 4.0}, init({'w': 1.0})))
    {'w': Array(-1., dtype=float32)}
    """

    @functools.wraps(make)
    def make_for_trees(*args: Any, **kwargs: Any) -> Optimizer:
        init, update, get_params = make(*args, **kwargs)

        def init_fn(params: trees.PyTree) -> OptimizerState:
            leaves, tree_def = jax.tree.flatten(params)
            return _pack([init(_strongly_typed(x)) for x in leaves], tree_def)

        def update_fn(step: Any, grads: trees.PyTree, opt_state: OptimizerState) -> OptimizerState:
            g_leaves = _gradient_leaves(grads, opt_state.tree_def)
            states = [update(step, g, s) for g, s in zip(g_leaves, _states(opt_state), strict=True)]
            new = _pack(states, opt_state.tree_def)
            _check_kept(opt_state, new)
            return new

        def params_fn(opt_state: OptimizerState) -> trees.PyTree:
            return opt_state.tree_def.unflatten([get_params(s) for s in _states(opt_state)])

        return Optimizer(init_fn, update_fn, params_fn)

    return make_for_trees


def _strongly_typed(x: Any) -> jax.Array:
    # A Python number would change its type in the first step, and so compile it twice.
    return jnp.asarray(x, jnp.result_type(x))


def _pack(states: list[Any], tree_def: Any) -> OptimizerState:
    flat = [jax.tree.flatten(state) for state in states]
    return OptimizerState(tuple(x for x, _ in flat), tree_def, tuple(d for _, d in flat))


def _states(opt_state: OptimizerState) -> list[Any]:
    pairs = zip(opt_state.subtree_defs, opt_state.packed_state, strict=True)
    return [subtree_def.unflatten(leaves) for subtree_def, leaves in pairs]


def _gradient_leaves(grads: trees.PyTree, tree_def: Any) -> list[Any]:
    leaves, grads_def = jax.tree.flatten(grads)
    if grads_def != tree_def:
        raise TypeError(
            "The gradients do not have the structure of the parameters that the optimizer was "
            f"initialized with: parameters {tree_def}, gradients {grads_def}."
        )
    return leaves


def _check_kept(old: OptimizerState, new: OptimizerState) -> None:
    for old_def, new_def in zip(old.subtree_defs, new.subtree_defs, strict=True):
        if old_def != new_def:
            raise TypeError(
                "The update function changed the structure of its state: it was given "
                f"{old_def} and returned {new_def}."
            )
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if np.shape(before) != np.shape(after):
            raise TypeError(
                f"The update function changed the shape of an array of its state from "
                f"{np.shape(before)} to {np.shape(after)}. Do the gradients have the shapes of "
                "the parameters?"
            )


class JoinPoint(NamedTuple):
    """Marks where, in an unpacked state, a parameter's own state stands for it."""

    subtree: Any


def unpack_optimizer_state(opt_state: OptimizerState) -> trees.PyTree:
    """Gives the parameters' tree with each leaf replaced by a `JoinPoint` of its state.

    The result is made of plain containers, so that `flax.serialization` and Orbax can
    write it and read it back into a target of the same kind.

    >>> init, _, _ = optimizer(lambda: (lambda x: (x, -x), None, None))()
    >>> unpack_optimizer_state(init({'w': 1.0}))
    {'w': JoinPoint(subtree=(Array(1., dtype=float32), Array(-1., dtype=float32)))}
    """
    return opt_state.tree_def.unflatten([JoinPoint(state) for state in _states(opt_state)])


def pack_optimizer_state(marked_tree: trees.PyTree) -> OptimizerState:
    """Undoes `unpack_optimizer_state`.

    Raises:
        TypeError: If a leaf of the tree does not stand inside a `JoinPoint`.

    >>> pack_optimizer_state({'w': JoinPoint((1.0, 2.0))}).packed_state
    ([1.0, 2.0],)
    """
    is_join = lambda node: isinstance(node, JoinPoint)  # noqa: E731
    points, tree_def = jax.tree.flatten(marked_tree, is_leaf=is_join)
    for name, point in zip(trees.leaf_names(marked_tree, is_leaf=is_join), points, strict=True):
        if not is_join(point):
            raise TypeError(
                f"{'/'.join(name)!r} is {type(point).__name__}, not a JoinPoint. Pack only what "
                "unpack_optimizer_state gave."
            )
    return _pack([point.subtree for point in points], tree_def)
