"""Several training steps as one program: `many(state, batches) -> (state, output)`.

It is tried without looking at every number of every new state: that would make each step
store its result before it is chosen. Where something turns out not to be finite, the
steps are run again from the first state, each of them guarded.
"""

from typing import Any

import jax
import optax

from tekoa.core import guard, objective
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
    counting = make_train_step(model, loss, tx, on_nan="count", **options)
    return in_sequence(counting, make_train_step(model, loss, tx, on_nan=on_nan, **options), on_nan)


def in_sequence(counting: Step, step: Step, on_nan: guard.OnNan) -> Step:
    """Makes a function that runs one step for each of several batches.

    Args:
        counting: The step with `on_nan="count"`.
        step: The step with `on_nan` as below.
        on_nan: What it promises holds for each of the steps.
    """

    def run(step: Step, state: TrainState, batches: Any) -> tuple[TrainState, jax.Array]:
        def one(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
            state, output = step(state, batch)
            return state, output.loss

        return jax.lax.scan(one, state, batches)

    def many(state: TrainState, batches: Any) -> tuple[TrainState, StepOutput]:
        if on_nan in ("count", "ignore"):
            new, losses = run(step, state, batches)
            return new, StepOutput(loss=losses[-1])
        new, losses = run(counting, state, batches)
        is_fine = guard.is_fine(state.health.n_bad, new, on_nan)
        new, losses = jax.lax.cond(
            is_fine, lambda: (new, losses), lambda: run(step, state, batches)
        )
        return new, StepOutput(loss=losses[-1])

    return many
