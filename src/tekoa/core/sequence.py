"""Several training steps as one program: `many(state, batches) -> (state, output)`.

It is tried without looking at every number of every new state: that would make each step
store its result before it is chosen. Where something turns out not to be finite, the
steps are run again from the first state, each of them guarded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    options["keep_grads"] = True
    free = _scanned(make_train_step(model, loss, tx, on_nan="ignore", **options))
    guarded = _scanned(make_train_step(model, loss, tx, on_nan=on_nan, **options))

    def many(state: TrainState, batches: Any) -> tuple[TrainState, StepOutput]:
        new, told = free(state, batches)
        if on_nan == "ignore":
            return new, _output(new, told)
        # Parameters are looked at once: what is not finite stays so, whatever is added.
        is_fine = jnp.all(told.is_fine) & trees.all_finite(new.params)
        if on_nan == "stop":
            is_fine &= state.health.n_bad == 0
        new, told = jax.lax.cond(is_fine, lambda: (new, told), lambda: guarded(state, batches))
        return new, _output(new, told)

    return many


class _Told(NamedTuple):
    """What the scan keeps of each step."""

    is_fine: jax.Array  # Whether the loss and all gradients were finite.
    loss: jax.Array
    gradients_l2norm: jax.Array  # Zero but for the last step, whose norm alone is told.


def _scanned(step: Step) -> Callable[[TrainState, Any], tuple[TrainState, _Told]]:
    def one(state: TrainState, given: tuple[Any, jax.Array]) -> tuple[TrainState, _Told]:
        batch, is_last = given
        state, output = step(state, batch)
        norm = jax.eval_shape(trees.global_norm, output.grads)
        return state, _Told(
            is_fine=jnp.isfinite(output.loss) & trees.all_finite(output.grads),
            loss=output.loss,
            gradients_l2norm=jax.lax.cond(
                is_last,
                lambda: trees.global_norm(output.grads),
                lambda: jnp.zeros(norm.shape, norm.dtype),
            ),
        )

    def scanned(state: TrainState, batches: Any) -> tuple[TrainState, _Told]:
        n = jax.tree.leaves(batches)[0].shape[0]
        return jax.lax.scan(one, state, (batches, jnp.arange(n) == n - 1))

    return scanned


def _output(state: TrainState, told: _Told) -> StepOutput:
    return StepOutput(
        loss=told.loss[-1],
        gradients_l2norm=told.gradients_l2norm[-1],
        weights_l2norm=trees.global_norm(state.params),
    )
