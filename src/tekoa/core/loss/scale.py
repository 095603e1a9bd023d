"""Dynamic loss scaling for training in float16.

Small gradients would be zero in float16. So the loss is multiplied by a scale before it is
differentiated, and the gradients are divided by it afterwards, in float32. An overflow halves the
scale and skips the update; after many steps without one, the scale doubles.

The scale does not change the loss itself: a NaN or Inf there is never an overflow of this kind.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import nonfinite
from tekoa.core.state import LossScale, TrainState
from tekoa.core.trees import PyTree

INITIAL = 2.0**15
LARGEST = 2.0**24
# At this scale NaN or Inf is not caused by the scale: it is reported.
SMALLEST = 1.0
N_GOOD_STEPS = 2000


def initial() -> LossScale:
    """Creates the scale before the first step, from distinct arrays."""
    n_good, n_overflows = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return LossScale(jnp.full((), INITIAL, jnp.float32), n_good, n_overflows)


def scale_of(state: TrainState) -> jax.Array:
    """Returns the current scale.

    Raises:
        ValueError: If the state has none.
    """
    if state.loss_scale is None:
        raise ValueError(
            "precision='fp16' needs a loss scale, which the state does not have. Use "
            "init_state(..., precision='fp16')."
        )
    return state.loss_scale.scale


def scaled_value_and_grad(objective: Callable[..., Any], scale: jax.Array) -> Callable[..., Any]:
    """Returns `jax.value_and_grad(objective, has_aux=True)`, computed with a scale.

    Args:
        objective: Returns `(total, (count, ...))`. The mean is scaled, not the total: the range of
            gradients should not depend on the number of rows or tokens.
        scale: The scale.
    """

    def scaled(params: PyTree, *args: Any):
        total, aux = objective(params, *args)
        count = jax.lax.stop_gradient(aux[0])
        factor = scale / jnp.where(count > 0, count, 1).astype(jnp.float32)
        return total.astype(jnp.float32) * factor, (factor, total, aux)

    def value_and_grad(*args: Any):
        (_, (factor, total, aux)), grads = jax.value_and_grad(scaled, has_aux=True)(*args)
        return (total, aux), jax.tree.map(
            lambda g: (g.astype(jnp.float32) / factor).astype(g.dtype), grads
        )

    return value_and_grad


def skip_overflow(
    old: TrainState, new: TrainState, value: jax.Array, are_finite: list[jax.Array]
) -> tuple[TrainState, list[jax.Array]]:
    """Undoes the update if the scale was too large, and adapts the scale.

    Everything else that the step computed stays: the loss was finite.

    Args:
        old: The state before the step.
        new: The state after it, with the old scale.
        value: The loss.
        are_finite: Whether each gradient leaf is finite.

    Returns:
        The state, and for each gradient leaf whether it is finite or an overflow explains it.
    """
    scale, n_good, n_overflows = new.loss_scale or initial()
    all_finite = jnp.all(jnp.stack(are_finite))
    is_overflow = ~all_finite & jnp.isfinite(value) & (scale > SMALLEST)
    params, opt_state, average = nonfinite.select(
        is_overflow,
        (old.params, old.opt_state, old.average),
        (new.params, new.opt_state, new.average),
    )
    is_grown = n_good + 1 >= N_GOOD_STEPS
    grown = jnp.where(is_grown, jnp.minimum(scale * 2, LARGEST), scale)
    adapted = LossScale(
        jnp.where(is_overflow, jnp.maximum(scale / 2, SMALLEST), grown),
        jnp.where(is_overflow | is_grown, 0, n_good + 1),
        n_overflows + is_overflow,
    )
    new = new.replace(params=params, opt_state=opt_state, average=average, loss_scale=adapted)
    return new, [is_finite | is_overflow for is_finite in are_finite]
