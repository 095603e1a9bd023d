"""The state that a loop starts from: initialised or restored, and placed on the devices."""

from typing import Any

import jax

from tekoa.core.state import Health, TrainState
from tekoa.loop.engine.dispatch import StepsPerDispatch
from tekoa.loop.task import Options, Restored, StateReader, Training
from tekoa.sharding.placement import Placement


def init_or_restore(
    training: Training,
    rng: jax.Array,
    *,
    batch: Any,
    place: Placement,
    options: Options,
    reader: StateReader | None = None,
) -> tuple[TrainState, Restored | None]:
    """Returns the state to start from, and the saved one if it was restored.

    Args:
        training: Creates a new state.
        rng: Root key of all randomness.
        batch: The first batch.
        place: Places arrays; fitted to the structure of the state.
        options: How steps are made.
        reader: Reads a saved state, if there is one.
    """
    place.check_rows(batch)
    batch = place.batch(batch)

    def make(rng: jax.Array, batch: Any) -> TrainState:
        return training.init(rng, batch, options)

    if place.layout is None and reader is None:
        return make(rng, batch), None
    shapes = jax.eval_shape(make, rng, batch)
    axes = {} if place.layout is None else training.axes(rng, batch)
    shapes = place.fit(shapes, axes)
    restored = reader.restore(shapes) if reader is not None else None
    if restored is None:
        return place.make(make, rng, batch), None
    state = restored.state
    if callable(state):
        state = state(place.make(make, rng, batch))
    if options.on_nan == "stop":
        # Steps that an earlier run skipped must not stop this one.
        state = state.replace(health=Health.zero())
    return place.state(state), restored


def resolve_steps_per_dispatch(
    requested: StepsPerDispatch, restored: Restored | None, place: Placement
) -> StepsPerDispatch:
    """Returns the steps per dispatch: as requested, else as in the run so far."""
    if requested != "auto":
        return requested
    if restored is not None and (saved := restored.facts.get("steps_per_dispatch")):
        return saved
    # Each process would measure, and they might choose differently.
    return 1 if place.spans_processes else "auto"
