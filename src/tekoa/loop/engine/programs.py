"""The compiled programs of a loop: one step, several steps, the last before a checkpoint."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tekoa.core import nonfinite, trees
from tekoa.core.state import StepOutput, TrainState
from tekoa.core.step import Step, scan_steps
from tekoa.loop.engine.dispatch import Dispatcher, StepsPerDispatch
from tekoa.loop.engine.flat_state import FlatStep, Leaves, StateCodec
from tekoa.loop.engine.rollback import Rollback
from tekoa.loop.task import Options, Training
from tekoa.sharding.placement import Placement

KeepGrads = bool | Literal["norms"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What a `Runner` runs.

    Attributes:
        dispatcher: Runs the steps between two checkpoints.
        last: Runs the last step before a checkpoint. It alone computes norms, which cost a
            twentieth of a small step.
        rollback: Verifies steps that run without a guard; None if all of them have one.
    """

    dispatcher: Dispatcher
    last: FlatStep
    rollback: Rollback | None = None


def with_norms(step: Step) -> Step:
    """Replaces the gradients in a step's output by norms of gradient, update and parameter."""

    def norms_of(grad: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.stack([trees.global_norm(x) for x in (grad, new - old, new)])

    def run(state: TrainState, batch: Any) -> tuple[TrainState, StepOutput]:
        new, output = step(state, batch)
        norms = jax.tree.map(norms_of, output.grads, state.params, new.params)
        return new, dataclasses.replace(output, grads=norms)

    return run


def make_programs(
    training: Training,
    codec: StateCodec,
    place: Placement,
    *,
    options: Options,
    steps_per_dispatch: StepsPerDispatch,
    keep_grads: KeepGrads,
) -> Programs:
    """Creates the programs; each is compiled when it first runs.

    Args:
        training: Creates the steps.
        codec: Converts states to lists of arrays.
        place: Where arrays are placed.
        options: How the steps are made.
        steps_per_dispatch: Steps per dispatch, or "auto".
        keep_grads: Whether the last step before a checkpoint returns its gradients, or their norms
            and those of updates and parameters.
    """
    is_cpu = jax.default_backend() == "cpu"
    # Elsewhere norms cost little, and a second program is a second, long compilation.
    is_single_program = not keep_grads and not (is_cpu and place.layout is None)
    # Elsewhere the guard costs little, and a second copy of the state may not fit.
    has_rollback = is_cpu and options.on_nan in ("stop", "skip")

    def flatten(options: Options) -> tuple[FlatStep, FlatStep]:
        step = training.make_step(options)
        return (
            codec.flat_step(step, loss_only=not is_single_program),
            codec.flat_step(scan_steps(step), loss_only=True),
        )

    unguarded = dataclasses.replace(options, on_nan="count") if has_rollback else options
    dispatcher = Dispatcher(
        *flatten(unguarded), steps_per_dispatch=steps_per_dispatch, jit=place.jit
    )
    last = dispatcher.one
    if not is_single_program:
        step = training.make_step(options, keep_grads=bool(keep_grads))
        last = place.jit(codec.flat_step(with_norms(step) if keep_grads == "norms" else step))
    if not has_rollback:
        return Programs(dispatcher=dispatcher, last=last)

    @jax.jit
    def all_finite_since(before: Leaves, after: Leaves) -> jax.Array:
        n_bad = codec.unflatten(before).health.n_bad
        return nonfinite.all_finite_since(n_bad, codec.unflatten(after), options.on_nan)

    def same_count(before: Leaves, after: Leaves) -> bool:
        n_before, n_after = int(codec.n_bad(before)), int(codec.n_bad(after))
        return n_before == n_after and not (n_before and options.on_nan == "stop")

    one, many = map(place.jit, flatten(options))
    guarded = {last: last, dispatcher.one: one, dispatcher.many: many}
    rollback = Rollback(guarded, all_finite_since, same_count)
    return Programs(dispatcher=dispatcher, last=last, rollback=rollback)
