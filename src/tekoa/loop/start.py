"""The state that a loop starts from: made new or read, each array where it belongs."""

from typing import Any

import jax

from tekoa.core.state import TrainState, healthy
from tekoa.loop.dispatch import StepsPerDispatch
from tekoa.loop.placement import Placement
from tekoa.loop.task import Restored, StateReader
from tekoa.loop.training import Options, Training


def starting_state(
    training: Training,
    rnkey: jax.Array,
    *,
    batch: Any,
    place: Placement,
    options: Options,
    reader: StateReader | None = None,
) -> tuple[TrainState, Restored | None]:
    """Gives the state to start from, and what it was restored from.

    Args:
        training: What makes a new state.
        rnkey: The root of all randomness.
        batch: The first batch.
        place: Where arrays live; it learns the form of the state.
        options: How steps are made.
        reader: Where to look for a saved state first.
    """
    place.check_rows(batch)
    batch = place.batch(batch)

    def make(rng: jax.Array, batch: Any) -> TrainState:
        return training.init(rng, batch, options)

    if place.layout is None and reader is None:
        return make(rnkey, batch), None
    form = jax.eval_shape(make, rnkey, batch)
    axes = {} if place.layout is None else training.axes(rnkey, batch)
    form = place.fit(form, axes)
    restored = reader.restore(form) if reader is not None else None
    if restored is None:
        return place.make(make, rnkey, batch), None
    state = restored.state
    if callable(state):
        state = state(place.make(make, rnkey, batch))
    if options.on_nan == "stop":
        # What an earlier run has skipped is no reason to stop at the first step of this one.
        state = state.replace(health=healthy())
    return place.state(state), restored


def settled_dispatch(
    wanted: StepsPerDispatch, restored: Restored | None, place: Placement
) -> StepsPerDispatch:
    """Gives the steps per dispatch: as asked for, else as the run had them so far."""
    if wanted != "auto":
        return wanted
    if restored is not None and (known := restored.facts.get("steps_per_dispatch")):
        return known
    # Measured by each process, it might differ among them.
    return 1 if place.spans_processes else "auto"
