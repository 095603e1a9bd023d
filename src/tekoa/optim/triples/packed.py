"""Extends optimizers for one array to trees, with a state that can be saved.

An `Optimizer` is a triple of functions, as in early JAX: `init_fn(params) -> opt_state`,
`update_fn(step, grads, opt_state) -> opt_state` and `params_fn(opt_state) -> params`. The
step starts at 0. The state holds the parameters, so a loop that also keeps them elsewhere
has two copies.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# The class of JAX itself: states that one of the two has unpacked can be packed by the other.
from jax.example_libraries.optimizers import JoinPoint as JoinPoint

from tekoa.core import trees

Array: TypeAlias = Any
Params: TypeAlias = trees.PyTree
State: TypeAlias = Any  # Of one array.
Updates: TypeAlias = trees.PyTree  # Gradients, with the structure of the parameters.
Step: TypeAlias = int
InitFn: TypeAlias = Callable[[Params], Any]  # params -> opt_state
UpdateFn: TypeAlias = Callable[..., Any]  # step, grads, opt_state -> opt_state
ParamsFn: TypeAlias = Callable[[Any], Params]  # opt_state -> params


class Optimizer(NamedTuple):
    """The three functions of an optimizer."""

    init_fn: InitFn
    update_fn: UpdateFn
    params_fn: ParamsFn


@jax.tree_util.register_pytree_with_keys_class
class OptimizerState(NamedTuple):
    """The state of every optimizer created by `optimizer`; its leaves are arrays only."""

    packed_state: tuple[list[Any], ...]  # The leaves of each parameter's state.
    tree_def: Any  # Structure of the parameters.
    subtree_defs: tuple[Any, ...]  # The structure of each parameter's state.

    def tree_flatten_with_keys(self) -> tuple[tuple[Any], tuple[Any, Any]]:
        """Separates arrays from structure, for JAX."""
        key = jax.tree_util.GetAttrKey("packed_state")
        return ((key, self.packed_state),), (self.tree_def, self.subtree_defs)

    @classmethod
    def tree_unflatten(cls, structure: tuple[Any, Any], children: tuple[Any]) -> "OptimizerState":
        """Combines arrays and structure, for JAX."""
        return cls(children[0], *structure)


def optimizer(opt_maker: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Optimizer]:
    """Extends an optimizer for one array to an `Optimizer` for trees; a decorator.

    Args:
        opt_maker: Returns `init(x)`, `update(step, g, state)` and `get_params(state)`, all for
            one array; `state` may be any tree of arrays. Do not store static values in it:
            under `jit` they would become traced arrays.

    Returns:
        A function with `opt_maker`'s arguments that returns an `Optimizer`. Its `update_fn`
        raises TypeError if the gradients do not have the structure of the parameters, or if
        `update` changes the structure or shapes of its state.

    >>> @optimizer
    ... def descend(rate):
    ...     return lambda x: x, lambda i, g, x: x - rate * g, lambda x: x
    >>> init, update, get_params = descend(0.5)
    >>> get_params(update(0, {'w': 4.0}, init({'w': 1.0})))
    {'w': Array(-1., dtype=float32)}
    """

    @functools.wraps(opt_maker)
    def make_for_trees(*args: Any, **kwargs: Any) -> Optimizer:
        init, update, get_params = opt_maker(*args, **kwargs)

        def init_fn(params: trees.PyTree) -> OptimizerState:
            leaves, tree_def = jax.tree.flatten(params)
            return _pack([init(_strongly_typed(x)) for x in leaves], tree_def)

        def update_fn(step: Any, grads: trees.PyTree, opt_state: OptimizerState) -> OptimizerState:
            pairs = zip(
                gradient_leaves(grads, opt_state.tree_def), param_states(opt_state), strict=True
            )
            new_state = _pack([update(step, g, s) for g, s in pairs], opt_state.tree_def)
            _check_unchanged(opt_state, new_state)
            return new_state

        def params_fn(opt_state: OptimizerState) -> trees.PyTree:
            return opt_state.tree_def.unflatten([get_params(s) for s in param_states(opt_state)])

        return Optimizer(init_fn, update_fn, params_fn)

    return make_for_trees


def _strongly_typed(x: Any) -> Any:
    # The dtype of a Python number would change in the first step, which would compile it twice.
    # Arrays of NumPy stay what they are until the first step.
    return x if isinstance(x, (np.ndarray, np.generic)) else jnp.asarray(x, jnp.result_type(x))


def _pack(states: list[Any], tree_def: Any) -> OptimizerState:
    flat = [jax.tree.flatten(state) for state in states]
    return OptimizerState(tuple(x for x, _ in flat), tree_def, tuple(d for _, d in flat))


def param_states(opt_state: OptimizerState) -> list[Any]:
    """Returns the state of each parameter."""
    pairs = zip(opt_state.subtree_defs, opt_state.packed_state, strict=True)
    return [subtree_def.unflatten(leaves) for subtree_def, leaves in pairs]


def gradient_leaves(grads: trees.PyTree, tree_def: Any) -> list[Any]:
    """Returns the leaves of the gradients.

    Raises:
        TypeError: If the gradients do not have the structure of the parameters.
    """
    leaves, grads_def = jax.tree.flatten(grads)
    if grads_def != tree_def:
        raise TypeError(
            "The gradients do not have the structure of the parameters that the optimizer was "
            f"initialised with: parameters {tree_def}, gradients {grads_def}."
        )
    return leaves


def _check_unchanged(old: OptimizerState, new: OptimizerState) -> None:
    for old_def, new_def in zip(old.subtree_defs, new.subtree_defs, strict=True):
        if old_def != new_def:
            raise TypeError(
                f"The update function changed the structure of its state from {old_def} to "
                f"{new_def}."
            )
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if np.shape(before) != np.shape(after):
            raise TypeError(
                f"The update function changed the shape of an array in its state from "
                f"{np.shape(before)} to {np.shape(after)}. Check that the gradients have the "
                "shapes of the parameters."
            )


def unpack_optimizer_state(opt_state: OptimizerState) -> trees.PyTree:
    """Returns the parameters' tree with a `JoinPoint` of its state in place of each leaf.

    The result can be pickled. For other formats, replace each `JoinPoint`, which is a leaf, by its
    `subtree`.

    >>> init, _, _ = optimizer(lambda: (lambda x: (x, -x), None, None))()
    >>> unpacked = unpack_optimizer_state(init({'w': 1.0}))
    >>> jax.tree.map(lambda point: point.subtree, unpacked)
    {'w': (Array(1., dtype=float32), Array(-1., dtype=float32))}
    """
    return opt_state.tree_def.unflatten([JoinPoint(state) for state in param_states(opt_state)])


def pack_optimizer_state(marked_pytree: trees.PyTree) -> OptimizerState:
    """Undoes `unpack_optimizer_state`.

    Raises:
        TypeError: If a leaf of the tree is not inside a `JoinPoint`.

    >>> pack_optimizer_state({'w': JoinPoint((1.0, 2.0))}).packed_state
    ([1.0, 2.0],)
    """
    points, tree_def = jax.tree.flatten(marked_pytree)
    for name, point in zip(trees.leaf_names(marked_pytree), points, strict=True):
        if not isinstance(point, JoinPoint):
            raise TypeError(
                f"{'/'.join(name)!r} is {type(point).__name__}, not a JoinPoint. Pass a result of "
                "unpack_optimizer_state."
            )
    return _pack([point.subtree for point in points], tree_def)
