"""Amos beside a model: scales and slot shapes by rules, partitions of the slots.

`params_fn_from_assign_map` makes `eta_fn` and `shape_fn` from a regex table, whose
formulas `evaluate` reads; both live in `tekoa.core`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tekoa.core import trees
from tekoa.core.formula import evaluate
from tekoa.core.rules import params_fn_from_assign_map
from tekoa.optim import amos

__all__ = [
    "evaluate",
    "maybe_reduce_axis_names",
    "params_fn_from_assign_map",
    "state_partition_rule",
]

AxisNames = Any  # A PartitionSpec, a tuple of names, or None.


def state_partition_rule(
    state: amos.ScaleByAmosState, params_axes: trees.PyTree
) -> amos.ScaleByAmosState:
    """Gives the partition of Amos slots from that of the parameters.

    An axis that the slot reduced to 1 is not sharded; a slot of one number, and the
    count, have None. A slot of lower rank has the last axes of its parameter, for which
    the parameter's own partition must name every axis.

    Args:
        state: The state, or its shapes from `jax.eval_shape`.
        params_axes: For each parameter a `PartitionSpec`, a tuple of mesh axes, or None.

    Raises:
        TypeError: If `state` is not that of `scale_by_amos`.
        ValueError: If `params_axes` does not have the parameters' structure.

    >>> tx = amos.scale_by_amos(0.1, lambda name, shape: 1.0, lambda name, shape: (1, shape[1]))
    >>> state = tx.init({'w': np.ones((4, 8), np.float32)})
    >>> tuple(state_partition_rule(state, {'w': PartitionSpec('data', 'model')}).v['w'])
    (None, 'model')
    """
    if not isinstance(state, amos.ScaleByAmosState):
        raise TypeError(
            f"Expected a ScaleByAmosState, got {type(state).__name__}. In the state of a chain "
            "(momentum, clipping) it is one of the entries."
        )
    drop = lambda axis: None  # noqa: E731
    return amos.ScaleByAmosState(
        count=None,
        v=_map_axes(drop, state.v, params_axes),
        b=_map_axes(drop, state.b, params_axes),
    )


def maybe_reduce_axis_names(var: Any, axes: AxisNames) -> PartitionSpec | None:
    """Prefixes 'reduced_' to the name of every axis of size 1, as T5X files do.

    Args:
        var: A slot; only its shape is looked at.
        axes: Names of its parameter's axes, or None.

    Returns:
        The names of the slot's axes; None for one number or where `axes` is None.

    >>> tuple(maybe_reduce_axis_names(np.ones((1, 8)), ('embed', 'mlp')))
    ('reduced_embed', 'mlp')
    """
    return _slot_axes(_prefixed, np.shape(var), axes)


def _prefixed(axis: Any) -> Any:
    if isinstance(axis, tuple):
        return tuple(map(_prefixed, axis))
    return None if axis is None else f"reduced_{axis}"


def _map_axes(rename: Callable[[Any], Any], slots: trees.PyTree, params_axes: trees.PyTree) -> Any:
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    leaves, treedef = jax.tree.flatten(slots, is_leaf=is_masked)
    try:
        axes = treedef.flatten_up_to(params_axes)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"params_axes must have one entry for every parameter, as {treedef} has: {error}"
        ) from None
    return treedef.unflatten(
        [
            slot if is_masked(slot) else _slot_axes(rename, np.shape(slot), names)
            for slot, names in zip(leaves, axes, strict=True)
        ]
    )


def _slot_axes(
    rename: Callable[[Any], Any], shape: tuple[int, ...], axes: AxisNames
) -> PartitionSpec | None:
    if not shape or axes is None:
        return None
    # A partition may leave out axes at its end; a slot, axes at its beginning.
    names = (*axes, *[None] * (len(shape) - len(axes)))[-len(shape) :]
    return PartitionSpec(*(rename(name) if n == 1 else name for n, name in zip(shape, names)))
