"""The state that a loop starts from: initialised or restored, and placed on the devices."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AxisType

from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import ModelFns
from tekoa.core.state import Health, TrainState
from tekoa.loop.engine.dispatch import StepsPerDispatch
from tekoa.loop.own_step import StepTraining
from tekoa.loop.task import (
    ModelTraining,
    Options,
    Restored,
    StateReader,
    Training,
    TrainTask,
    model_fns_for,
)
from tekoa.sharding.mesh import LayoutError
from tekoa.sharding.placement import Placement


class InitialState(NamedTuple):
    """The state to start from, and where it comes from."""

    state: TrainState
    restored: Restored | None  # What was read, if anything was.
    load_seconds: float  # The time it took to read it; 0 if there was nothing to read.


def as_training(
    task: TrainTask | Training, model: Any, input_sample: Any, **options: Any
) -> tuple[Training, ModelFns | None]:
    """Returns what a loop runs, and the model's functions if the step is Tekoa's.

    Args:
        task: The task, or a `Training`, which is returned as it is.
        model: The model, of any library, or a reader around one; None if the task has its own step.
        input_sample: Inputs for initialisation; those of the first batch by default.
        **options: As for `as_model_fns`.
    """
    if not isinstance(task, TrainTask):
        return task, None
    if task.step is not None:
        return StepTraining(task), None
    fns = model_fns_for(task, model.target if isinstance(model, StateReader) else model, **options)
    return ModelTraining(fns, task, input_sample), fns


def init_or_restore(
    training: Training,
    rng: jax.Array,
    *,
    batch: Any,
    place: Placement,
    options: Options,
    reader: StateReader | None = None,
) -> InitialState:
    """Returns the state to start from, initialised or restored.

    Args:
        training: Creates a new state.
        rng: Root key of all randomness.
        batch: The first batch.
        place: Places arrays; fitted to the structure of the state.
        options: How steps are made.
        reader: Reads a saved state, if there is one.
    """
    place.check_rows(batch)
    _check_sizes(getattr(training.data, "batch_sizes", ()), options, place)
    batch = place.batch(batch)

    def make(rng: jax.Array, batch: Any) -> TrainState:
        return training.init(rng, batch, options)

    if place.layout is None and reader is None:
        return InitialState(make(rng, batch), None, 0.0)
    shapes = jax.eval_shape(make, rng, batch)
    axes = {} if place.layout is None else training.axes(rng, batch)
    shapes = place.fit(shapes, axes)
    _check_line_search(shapes, place)
    began = time.perf_counter()
    restored = reader.restore(shapes) if reader is not None else None
    load_seconds = time.perf_counter() - began
    if restored is None:
        return InitialState(place.make(make, rng, batch), None, 0.0)
    state = restored.state
    if callable(state):
        state = state(place.make(make, rng, batch))
    return InitialState(place.state(resumed(state, options)), restored, load_seconds)


def resumed(state: TrainState, options: Options) -> TrainState:
    """Returns the state in which a loop continues from a restored one."""
    if options.on_nan != "stop":
        return state
    # Steps that an earlier run skipped must not stop this one.
    return state.replace(health=Health.zero())


def _check_sizes(sizes: Sequence[int], options: Options, place: Placement) -> None:
    """Raises if batches that come later could not be divided; the step checks the first one.

    Raises:
        ValueError: If a number of rows is not divisible by the microbatches and devices.
    """
    n_devices = 1 if place.layout is None else place.layout.n_row_parts
    n_parts = options.accumulate * n_devices
    if uneven := [size for size in sizes[1:] if size % n_parts]:
        raise ValueError(
            f"Batches of {uneven[0]} rows cannot be divided into accumulate={options.accumulate} "
            f"microbatches on {n_devices} devices. Use multiples of {n_parts}."
        )


def _check_line_search(shapes: TrainState, place: Placement) -> None:
    """Raises if L-BFGS would run on arrays that are split over axes of type Explicit.

    Raises:
        LayoutError: If it would. Its products of such arrays have no sharding of their own.
    """
    layout = place.layout
    if layout is None or AxisType.Explicit not in layout.mesh.axis_types:
        return

    def is_lbfgs(node: Any) -> bool:
        return isinstance(node, optax.ScaleByLBFGSState)

    states = filter(is_lbfgs, jax.tree.leaves(shapes.opt_state, is_leaf=is_lbfgs))
    if any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(list(states))):
        raise LayoutError(
            "L-BFGS cannot run on arrays that are split over mesh axes of type Explicit. Use axes "
            "of type Auto, as tekoa.make_mesh does, or leave out optimizer_rules."
        )


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


def setup_facts(training: Training, state: TrainState, batch: Any) -> dict[str, Any]:
    """Returns the size of the model and the shapes of its inputs, for `Checkpoint.setup`.

    Args:
        training: What the loop runs.
        state: The state.
        batch: A batch of this process.
    """
    facts: dict[str, Any] = {
        "n_weights": trees.n_elements(state.params),
        "n_bytes": trees.n_bytes(state.params),
    }
    if isinstance(training, ModelTraining):
        facts["inputs"] = batches.shapes_to_json(training.init_inputs(batch))
    return facts
