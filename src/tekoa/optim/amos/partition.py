"""Partitioning of Amos slots, derived from that of the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tekoa.core import trees
from tekoa.optim.amos import transform

AxisNames = Any  # A PartitionSpec, a tuple of names, or None.


def state_partition_rule(
    state: transform.ScaleByAmosState, params_axes: trees.PyTree
) -> transform.ScaleByAmosState:
    """Returns the partition of Amos slots, derived from that of the parameters.

    An axis of size 1 in the slot is not sharded; scalar slots and the count get None. A slot
    of lower rank has the last axes of its parameter, whose partition must then name every
    axis.

    Args:
        state: The state, or its shapes from `jax.eval_shape`.
        params_axes: A `PartitionSpec`, a tuple of mesh axes or None for each parameter.

    Raises:
        TypeError: If `state` is not that of `scale_by_amos`.
        ValueError: If `params_axes` does not have the parameters' structure.

    >>> first_reduced = lambda name, shape: (1, *shape[1:])
    >>> tx = transform.scale_by_amos(0.1, lambda name, shape: 1.0, first_reduced)
    >>> state = tx.init({'w': np.ones((4, 8), np.float32)})
    >>> tuple(state_partition_rule(state, {'w': PartitionSpec('data', 'model')}).v['w'])
    (None, 'model')
    """
    if not isinstance(state, transform.ScaleByAmosState):
        raise TypeError(
            f"Expected a ScaleByAmosState, got {type(state).__name__}. The state of a chain "
            "(with momentum or clipping) contains it as one of its entries."
        )
    v, b = _partition(state.v, params_axes), _partition(state.b, params_axes)
    return transform.ScaleByAmosState(count=None, v=v, b=b)


def maybe_reduce_axis_names(var: Any, axes: AxisNames) -> PartitionSpec | None:
    """Returns axis names with 'reduced_' before those of size 1, as in T5X checkpoints.

    Args:
        var: A slot; only its shape is used.
        axes: Names of its parameter's axes, or None.

    Returns:
        The names of the slot's axes, or None if the slot is a scalar or `axes` is None.

    >>> tuple(maybe_reduce_axis_names(np.ones((1, 8)), ('embed', 'mlp')))
    ('reduced_embed', 'mlp')
    """
    return _slot_axes(_add_prefix, np.shape(var), axes)


def _add_prefix(axis: Any) -> Any:
    if isinstance(axis, tuple):
        return tuple(map(_add_prefix, axis))
    return None if axis is None else f"reduced_{axis}"


def _partition(slots: trees.PyTree, params_axes: trees.PyTree) -> trees.PyTree:
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    leaves, treedef = jax.tree.flatten(slots, is_leaf=is_masked)
    try:
        axes = treedef.flatten_up_to(params_axes)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"params_axes must have one entry per parameter, like {treedef}: {error}"
        ) from None
    return treedef.unflatten(
        slot if is_masked(slot) else _slot_axes(lambda axis: None, np.shape(slot), names)
        for slot, names in zip(leaves, axes, strict=True)
    )


def _slot_axes(
    rename: Callable[[Any], Any], shape: tuple[int, ...], axes: AxisNames
) -> PartitionSpec | None:
    if not shape or axes is None:
        return None
    # A partition may omit trailing axes; a slot may omit leading ones.
    names = (*axes, *[None] * (len(shape) - len(axes)))[-len(shape) :]
    return PartitionSpec(*(rename(name) if n == 1 else name for n, name in zip(shape, names)))
