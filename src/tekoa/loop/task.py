"""The inputs of a loop: the task, the training it describes, a reader of states, a stop flag.

A `TrainTask` describes training by a model, a loss and an optimizer. For a custom step, pass an
object that implements `Training` instead.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from tekoa.bridges import any_model, optimizers
from tekoa.bridges.scales import find_scales
from tekoa.core import batch as batches
from tekoa.core import metrics, nonfinite, objective
from tekoa.core import step as steps
from tekoa.core.loss.reduction import Reduction
from tekoa.core.model import LogicalAxes, ModelFns, Remat
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.optim import freezing

_log = logging.getLogger("tekoa")


@dataclasses.dataclass(frozen=True)
class TrainTask:
    """What to train on which data.

    Attributes:
        apply: The function that runs the model, if the loop's `model` does not include it.
        optimizer: Any optax transformation; the name of one: "auto" for the one that needs no
            settings, "sphere", "muon", "amos", or a name of optax or optax.contrib; an (init,
            update, get_params) triple; or an `nnx.Optimizer`, whose `wrt` is the default of
            `trainable`.
        loss: `loss(*outputs, *targets)`, as for `make_train_step`; None if the model returns the
            loss itself.
        data: An iterable of `(inputs, targets)` pairs or of dicts.
        split: Separates the inputs of a batch from its targets.
        inputs: Instead of `split`, for batches that are dicts: the name of the model's input, or
            several names.
        targets: The names of the loss's targets, with `inputs`; by default the one entry that is
            left.
        reduction: Whether the loss is a "mean" or a "sum" over rows, as for `make_train_step`.
        trainable: Which parameters to train; None for all. A pattern searched in their names; a
            table of pattern to True or False, of which the first match wins; a tree of booleans
            like the parameters; `fn(name, array)`; or for an NNX module a filter such as
            `nnx.LoRA`. The others stay as they are and have no optimizer state.
        unfreeze_at: Which parameters begin to train later: pattern to the number of updates before
            their first one, as for `tekoa.freeze_on_schedule`.
        freeze_at: Which parameters are frozen later: pattern to the number of updates after which.
        remat: As for `make_train_step`, like `clip_norm` and `grad_noise`.
        step: Your own step, with `init` and in place of model, loss and optimizer:
            `step(state, batch, rng) -> (state, metrics)`, pure. Metrics are numbers by name.
        init: `init(rng, batch)` returns the state for `step`: any tree of arrays, which may
            contain NNX or Equinox modules.

    Raises:
        TypeError: If the optimizer or the data is missing, or arguments exclude each other.
    """

    apply: Callable[..., Any] | None = None
    optimizer: Any = None
    loss: Callable[..., Any] | None = None
    data: Any = None
    _: dataclasses.KW_ONLY
    split: objective.Split = batches.split_batch
    inputs: str | Sequence[str] | None = None
    targets: str | Sequence[str] | None = None
    reduction: Reduction = "auto"
    trainable: Any = None
    unfreeze_at: Mapping[str, int] | None = None
    freeze_at: Mapping[str, int] | None = None
    remat: Remat | None = None
    clip_norm: float | None = None
    grad_noise: float | None = None
    step: Callable[..., Any] | None = None
    init: Callable[..., Any] | None = None

    def __post_init__(self):
        _check_present(self, "optimizer" if self.step is None else "init", "data")
        names = ("apply", "optimizer", "loss", "trainable", "unfreeze_at", "freeze_at", "remat")
        names += ("clip_norm", "grad_noise")
        if self.step is not None and any(getattr(self, name) is not None for name in names):
            raise TypeError(f"TrainTask(step=) replaces {', '.join(names)}.")
        object.__setattr__(self, "split", _split_of(self))


@dataclasses.dataclass(frozen=True)
class EvalTask:
    """What to measure on which data.

    Attributes:
        apply: The function that runs the model, if the loop's `model` does not include it.
        metrics: Name to `fn(*outputs, *targets)`, which returns a mean over the batch, one
            number per row, a `Mean(total, count)`, or an object with `merge` and `compute`, such
            as `Totals` or a metric of clu or metrax.
        data: An iterable of `(inputs, targets)` pairs or of dicts.
        split: Separates the inputs of a batch from its targets.
        inputs: As for `TrainTask`.
        targets: As for `TrainTask`.
        gathered: Name to `fn(*outputs, *targets)` for metrics that need all rows at once, such
            as an area under a curve: called on the host with NumPy arrays of the rows of all
            batches. The outputs must have a row per row of the batch.

    Raises:
        TypeError: If the data is missing, or `inputs` is passed with `split`.
    """

    apply: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    data: Any = None
    _: dataclasses.KW_ONLY
    split: objective.Split = batches.split_batch
    inputs: str | Sequence[str] | None = None
    targets: str | Sequence[str] | None = None
    gathered: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check_present(self, "data")
        object.__setattr__(self, "split", _split_of(self))


def _check_present(task: Any, *names: str) -> None:
    for name in names:
        if getattr(task, name) is None:
            raise TypeError(f"{type(task).__name__} needs {name}=.")


def _split_of(task: Any) -> objective.Split:
    """Returns the function that splits a batch, from `split` or from the names of entries."""
    if task.inputs is None:
        if task.targets is not None:
            raise TypeError("targets= needs inputs=, the names of the model's inputs.")
        return task.split
    if getattr(task.split, "func", task.split) is batches.split_named:  # A copy of a task.
        return task.split
    if task.split is not batches.split_batch:
        raise TypeError("Pass split= or inputs=, not both: they describe the same thing.")
    return functools.partial(batches.split_named, inputs=task.inputs, targets=task.targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a step is made; see `make_train_step`."""

    accumulate: int = 1
    ema: float | None = None
    precision: objective.Precision = "float32"
    on_nan: nonfinite.OnNan = "stop"


class Training(Protocol):
    """What a loop runs: the initial state, the step, and the metrics that it accumulates."""

    @property
    def data(self) -> Iterable[Any]:
        """The batches."""
        ...

    @property
    def reported(self) -> Sequence[str]:
        """Names of the `StepOutput` fields to report as metrics, unless they are None."""
        ...

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Separates the inputs of a batch from its targets; raises if it is not a batch."""
        ...

    def axes(self, rng: jax.Array, batch: Any) -> LogicalAxes:
        """Returns the logical axes of the model's arrays, by collection and name."""
        ...

    def init(self, rng: jax.Array, batch: Any, options: Options) -> TrainState:
        """Creates the state before the first step; may be traced."""
        ...

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        """Creates `step(state, batch) -> (state, StepOutput)`, pure; it increments `step`."""
        ...

    def empty(self, sums: PyTree) -> PyTree:
        """Returns the state's metrics before anything is accumulated, in new arrays."""
        ...

    def compute(self, sums: PyTree) -> dict[str, float]:
        """Computes the metrics accumulated since they were last emptied."""
        ...


def model_fns_for(task: TrainTask, model: Any, **options: Any) -> ModelFns:
    """Returns the model of a task, with the parameters to train; options as for `as_model_fns`.

    Logs one line if the model looks as if only some of its parameters should be trained.
    """
    trainable = task.trainable
    if trainable is None and optimizers.is_nnx_optimizer(task.optimizer):
        trainable = task.optimizer
    if trainable is None and (hint := any_model.missing_trainable(model)):
        _log.warning(hint)
    return any_model.as_model_fns(model, task.apply, trainable=trainable, **options)


@runtime_checkable
class ChoosesOptimizer(Protocol):
    """A `Training` whose optimizer may be named; see `ModelTraining`."""

    optimizer_line: str

    @property
    def facts(self) -> dict[str, Any]: ...

    def resolve_optimizer(
        self, batch: Any, n_steps: int | None, saved: Mapping[str, Any] | None = None
    ) -> None: ...


class ModelTraining:
    """The training of a `TrainTask`.

    Args:
        fns: The model.
        task: Optimizer, loss and data. An optimizer with a name is resolved by
            `resolve_optimizer`, before `init` and `make_step`.
        input_sample: Inputs for initialisation; those of the first batch by default.
    """

    reported: Sequence[str] = ("loss", "gradients_l2norm", "weights_l2norm")

    def __init__(self, fns: ModelFns, task: TrainTask, input_sample: Any = None):
        optimizer = optimizers.as_transformation(task.optimizer)
        transformation = optimizers.accepting_native(optimizer, fns.native)
        if task.unfreeze_at or task.freeze_at:
            transformation = freezing.freeze_on_schedule(
                transformation, unfreeze_at=task.unfreeze_at, freeze_at=task.freeze_at
            )
        task = dataclasses.replace(task, optimizer=transformation)
        self._fns, self._task, self._input_sample = fns, task, input_sample
        self.optimizer_line = ""
        self._optimizer = optimizer
        self.data = task.data

    def resolve_optimizer(
        self, batch: Any, n_steps: int | None, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Chooses the optimizer if the task names one; `optimizer_line` says which.

        Args:
            batch: The first batch.
            n_steps: The total number of steps, if known.
            saved: The entry "optimizer" in the `facts` of an earlier part of the same run.
        """
        if saved is not None and saved == self.facts.get("optimizer"):
            return  # The same choice again.
        task = self._task
        find_table = functools.partial(find_scales, self._fns, task.loss, batch, split=task.split)
        with batches.described_errors(batch, task.split):
            self.optimizer_line = optimizers.resolve_named(
                self._optimizer, find_table, n_steps, saved
            )

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed run needs to choose the same optimizer; empty if it has no name."""
        return optimizers.facts_of(self._optimizer)

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self._task.split(batch)

    def axes(self, rng: jax.Array, batch: Any) -> LogicalAxes:
        if self._fns.axes is None:
            return {}
        return self._fns.axes(rng, jax.eval_shape(self.init_inputs, batch))

    def init(self, rng: jax.Array, batch: Any, options: Options) -> TrainState:
        """Creates the state of a new model, with the metrics that the loss returns."""
        task = self._task
        loss_of = objective.Objective(self._fns, task.loss, split=task.split)
        with batches.described_errors(batch, task.split):
            inputs = self.init_inputs(batch)
            state = steps.init_state(
                self._fns,
                task.optimizer,
                rng,
                inputs=inputs,
                ema=options.ema,
                precision=options.precision,
            )
            variables = objective.merge_carry(state.variables, state.carry)
            _, (_, _, means) = jax.eval_shape(loss_of, state.params, variables, batch, state.rng)
        return state.replace(sums=metrics.zeros(means))

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        task = self._task
        return steps.make_train_step(
            self._fns,
            task.loss,
            task.optimizer,
            split=task.split,
            reduction=task.reduction,
            remat=task.remat,
            clip_norm=task.clip_norm,
            grad_noise=task.grad_noise,
            keep_grads=keep_grads,
            **dataclasses.asdict(options),
        )

    def empty(self, sums: PyTree) -> PyTree:
        return metrics.zeros(sums)

    def compute(self, sums: PyTree) -> dict[str, float]:
        return metrics.compute(sums)

    def init_inputs(self, batch: Any) -> tuple[Any, ...]:
        sample = self._input_sample
        if sample is None:
            return self._task.split(batch)[0]
        return sample if isinstance(sample, tuple) else (sample,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A saved state and what was saved with it.

    Attributes:
        state: The state to resume from, or a function that computes it from a fresh one.
        data_state: Data position.
        facts: Choices that the run has made so far.
        commit: The digest of the commit that it comes from; empty if there is none.
    """

    state: TrainState | Callable[[TrainState], TrainState]
    data_state: Any = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    commit: str = ""


@runtime_checkable
class StateReader(Protocol):
    """What may be passed as a loop's `model` to resume from a saved state."""

    @property
    def target(self) -> Any:
        """The model to initialise from scratch: anything that `TrainLoop` accepts."""
        ...

    def restore(self, fresh: TrainState) -> Restored | None:
        """Returns the saved state in the structure of a fresh one, or None if there is none."""
        ...


class StopRequest(Protocol):
    """What a loop polls to learn whether to stop: `hosts.StopFlag`, or a `threading.Event`."""

    def is_set(self) -> bool: ...


def check_count(name: str, value: Any, least: int) -> int:
    """Returns a whole number that a user set.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}.")
    return int(value)
