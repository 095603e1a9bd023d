"""Several training steps as one program: `many(state, batches) -> (state, output)`.

It is tried without looking at every number of every new state: that would make each step
store its result before it is chosen. Where something turns out not to be finite, the
steps are run again from the first state, each of them guarded.
"""

from collections.abc import Callable
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
        leading axis, along which the steps are taken; the output is that of the last one.
    """
    free = _scanned(make_train_step(model, loss, tx, on_nan="ignore", **options))
    guarded = _scanned(make_train_step(model, loss, tx, on_nan=on_nan, **options))

    def many(state: TrainState, batches: Any) -> tuple[TrainState, StepOutput]:
        new, outputs = free(state, batches)
        last = _last(new, outputs)
        if on_nan == "ignore":
            return new, last
        # Parameters are looked at once: what is not finite stays so, whatever is added.
        is_fine = jnp.isfinite(last.weights_l2norm)
        for of_steps in outputs:
            is_fine &= jnp.all(jnp.isfinite(of_steps))
        if on_nan == "stop":
            is_fine &= state.health.n_bad == 0

        def again() -> tuple[TrainState, StepOutput]:
            kept, outputs = guarded(state, batches)
            return kept, _last(kept, outputs)

        return jax.lax.cond(is_fine, lambda: (new, last), again)

    return many


Numbers = tuple[jax.Array, jax.Array]


def _scanned(step: Step) -> Callable[..., tuple[TrainState, Numbers]]:
    """Runs steps one after the other; gives the loss and gradient norm of each."""

    def one(state: TrainState, batch: Any) -> tuple[TrainState, Numbers]:
        state, output = step(state, batch)
        return state, (output.loss, output.gradients_l2norm)

    return lambda state, batches: jax.lax.scan(one, state, batches)


def _last(state: TrainState, outputs: Numbers) -> StepOutput:
    losses, gradients_l2norms = outputs
    return StepOutput(
        loss=losses[-1],
        gradients_l2norm=gradients_l2norms[-1],
        weights_l2norm=trees.global_norm(state.params),
    )
