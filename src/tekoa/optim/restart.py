"""Restarts the state of an optimizer after its first step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tekoa.core import trees


class RestartState(NamedTuple):
    """The state of a transformation that restarts after its first update."""

    count: Any  # Completed updates, an int32 array.
    inner: Any  # The transformation's own state.


def restart_after_first(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Creates `tx` with a state that is initialised again before the second update.

    If the first step rescales the parameters, gradients taken before it have another size.
    They would stay in the running means for many steps.

    >>> tx = restart_after_first(optax.trace(0.5))
    >>> params = {'w': jnp.zeros(())}
    >>> state = tx.init(params)
    >>> for gradient in (100.0, 1.0, 1.0):
    ...     updates, state = tx.update({'w': jnp.float32(gradient)}, state, params)
    >>> float(updates['w'])
    1.5
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: trees.PyTree) -> RestartState:
        return RestartState(jnp.zeros((), jnp.int32), tx.init(params))

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None, **extra_args: Any
    ) -> tuple[trees.PyTree, RestartState]:
        is_second = state.count == 1
        initial = trees.shard_like(state.inner, tx.init(updates if params is None else params))
        inner = jax.tree.map(
            lambda first, current: jnp.where(is_second, first, current), initial, state.inner
        )
        updates, inner = tx.update(updates, inner, params, **extra_args)
        return updates, RestartState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)
