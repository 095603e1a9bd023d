"""The compiled programs of a loop: one step, several of them, the last before a checkpoint."""

import dataclasses

import jax

from tekoa.core import guard
from tekoa.loop.dispatch import Dispatcher, StepsPerDispatch
from tekoa.loop.flat import FlatStep, Form, Leaves
from tekoa.loop.placement import Placement
from tekoa.loop.training import Options, Training
from tekoa.loop.trial import Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What a `Runner` runs.

    Attributes:
        dispatcher: Runs the steps between two checkpoints.
        last: Runs the last step before a checkpoint; it alone computes norms, which cost a
            twentieth of a small step.
        trial: Looks after single steps that have no guard; None where they have one.
    """

    dispatcher: Dispatcher
    last: FlatStep
    trial: Trial | None = None


def make_programs(
    training: Training,
    form: Form,
    place: Placement,
    *,
    options: Options,
    wanted: StepsPerDispatch,
    keeps_grads: bool,
) -> Programs:
    """Makes the programs; they are compiled when they are first run.

    Args:
        training: Makes the steps.
        form: Turns states into lists of arrays.
        place: Where they lie.
        options: How the steps are made.
        wanted: Steps per dispatch.
        keeps_grads: If true, the last step before a checkpoint gives its gradients.
    """
    is_cpu = jax.default_backend() == "cpu"
    # Elsewhere norms cost little, and a second program is a second, long compilation.
    is_one = not keeps_grads and not (is_cpu and place.layout is None)
    # Elsewhere the guard costs little, and a second copy of the state may not fit.
    is_tried = is_cpu and options.on_nan in ("stop", "skip")
    flat = form.step if is_one else form.lean
    guarded = free = flat(training.make_step(options))
    if is_tried:
        free = flat(training.make_step(dataclasses.replace(options, on_nan="count")))
    many = form.lean(training.make_steps(options))
    dispatcher = Dispatcher(free, many, wanted=wanted, jit=place.jit)
    last = dispatcher.one
    if not is_one:
        last = place.jit(form.step(training.make_step(options, keep_grads=keeps_grads)))
    if not is_tried:
        return Programs(dispatcher=dispatcher, last=last)

    @jax.jit
    def is_fine(before: Leaves, after: Leaves) -> jax.Array:
        n_bad = form.state(before).health.n_bad
        return guard.is_fine(n_bad, form.state(after), options.on_nan)

    trial = Trial(dispatcher.one, place.jit(guarded), is_fine)
    return Programs(dispatcher=dispatcher, last=last, trial=trial)
