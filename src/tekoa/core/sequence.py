"""Several training steps as one program: `many(state, batches) -> (state, output)`.

It is tried without looking at every number of every new state: that would make each step
store its result before it is chosen. Where something turns out not to be finite, the
steps are run again from the first state, each of them guarded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core import guard, objective, trees
from tekoa.core.model import ModelFns
from tekoa.core.state import StepOutput, TrainState
from tekoa.core.step import Step, make_train_step


def make_train_steps(
    model: ModelFns,
    loss: objective.Loss | None,
    tx: optax.GradientTransformation,
    *,
    on_nan: guard.OnNan = "stop",
    **options: Any,
) -> Step:
    """Makes a function that runs one step for each of several batches.

    Args:
        model: As `make_train_step`.
        loss: As `make_train_step`.
        tx: As `make_train_step`.
        on_nan: As `make_train_step`; what it promises holds for each of the steps.
        **options: What else `make_train_step` takes, except `keep_grads`.

    Returns:
        `many(state, batches) -> (state, output)`: the leaves of `batches` have one more
        leading axis, along which the steps are taken; the output has the last one's loss.
    """
    free = make_train_step(model, loss, tx, on_nan="ignore", keep_grads=True, **options)
    guarded = make_train_step(model, loss, tx, on_nan=on_nan, **options)

    def tried(state: TrainState, batch: Any) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        state, output = free(state, batch)
        are_finite = [jnp.isfinite(output.loss), *trees.are_finite(output.grads)]
        return state, (output.loss, jnp.all(jnp.stack(are_finite)))

    def kept(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        state, output = guarded(state, batch)
        return state, output.loss

    def many(state: TrainState, batches: Any) -> tuple[TrainState, StepOutput]:
        new, (losses, are_fine) = jax.lax.scan(tried, state, batches)
        if on_nan == "ignore":
            return new, StepOutput(loss=losses[-1])
        # Parameters are looked at once: what is not finite stays so, whatever is added.
        is_fine = jnp.all(are_fine) & jnp.all(jnp.stack(trees.are_finite(new.params)))
        if on_nan == "stop":
            is_fine &= state.health.n_bad == 0
        new, losses = jax.lax.cond(
            is_fine, lambda: (new, losses), lambda: jax.lax.scan(kept, state, batches)
        )
        return new, StepOutput(loss=losses[-1])

    return many
