"""The interface between modes and model files, and the data handling that both forms share."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import optax

from tekoa import data
from tekoa.bridges import any_model
from tekoa.data.batching.schedule import Schedule, parse_table
from tekoa.estimator.cli import processes, valid_sets
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import experiment
from tekoa.estimator.run import layout as layout_lib
from tekoa.estimator.run.passes import MarkFirst
from tekoa.estimator.run.run import Run
from tekoa.extensions.generation.samples import TextFns
from tekoa.extensions.serial import Stage, serial, when
from tekoa.hosts.signals import StopFlag
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.task import ModelTraining, Training, TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.loop.triggers import EveryChecks
from tekoa.sharding.layout import Layout

Mode = Literal["train", "eval_once", "eval_wait", "predict"]
Kind = Literal["train", "valid", "eval", "pred"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainParts:
    """The parts of a training loop that come from the model file.

    Attributes:
        model: The model; None if the task has its own step.
        task: Optimizer, loss and data, or a `Training`.
        optimizer: The optimizer of the task.
        layout: The layout, with the rules of the model file; None for one device.
        classes: The names of the classes, if the data names them.
    """

    model: Any
    task: TrainTask | Training
    optimizer: optax.GradientTransformation
    layout: Layout | None
    classes: Sequence[str] | None = None

    @property
    def training(self) -> Training:
        """The functions that create and update the state."""
        if isinstance(self.task, TrainTask):
            return ModelTraining(any_model.as_model_fns(self.model), self.task)
        return self.task


class Program(Protocol):
    """A model file, ready to be run by the loops."""

    def check_data(self, kind: Kind) -> str:
        """Returns the pattern of the data; raises `UsageError` if its flag is missing."""
        ...

    def train_batches(self, seed: int) -> Any:
        """Returns the stream of training batches."""
        ...

    def train_parts(self, batches: Iterable[Any], layout: Layout | None) -> TrainParts:
        """Returns the parts of a training loop on these batches."""
        ...

    def validation(
        self, parts: TrainParts, loop: TrainLoop, stop_flag: StopFlag | None = None
    ) -> Callable[[Checkpoint], Summary] | None:
        """Returns the stage that validates a checkpoint, or None if there is no data for it.

        `loop` was built from `parts`. The stage raises `InterruptedError` once the flag is set.
        """
        ...

    def text_fns(self) -> TextFns | None:
        """Returns how the model reads and writes text; None if the model file does not say."""
        ...

    def evaluation(self) -> Callable[[str | None, Any], dict[str, float]]:
        """Returns `evaluate(path, stop_flag)`, which computes the metrics of a stored step.

        With `path=None` the model keeps its initial values.
        """
        ...

    def predictions(self, path: str | None, stop_flag: Any) -> Iterator[Any]:
        """Yields one result per example, in order; `path=None` uses the initial values."""
        ...

    def sample(self, kind: Kind) -> Any:
        """Returns one batch of the data, as the step of its mode receives it."""
        ...

    def inference(self, path: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns `f(*inputs) -> outputs` with the weights of a stored step, and sample inputs."""
        ...

    def scales(self) -> Any:
        """Returns the table of Amos scales found for the model."""
        ...


class ProgramData:
    """The data that the flags of a run name. Each is opened once and then reused.

    Args:
        run: The run.
        open_source: `open_source(kind, pattern)` opens the data of one kind.
    """

    def __init__(self, run: Run, open_source: Callable[[Kind, str], data.Source]):
        self._run, self._config = run, run.config
        self._open = functools.cache(open_source)

    def source(self, kind: Kind, name: str = "") -> data.Source:
        """Returns the data of one kind; with a name, one of `--valid_sets`."""
        pattern = valid_sets.parse_sets(self._config.valid_sets)[name].pattern if name else None
        return self._open(kind, pattern or self.pattern(kind))

    def validation(
        self, loop: TrainLoop, make_stage: Callable[[str], Stage], *, has_main: bool
    ) -> Callable[[Checkpoint], Summary] | None:
        """Returns the stage that validates on all data when it is due; None if there is none.

        Args:
            loop: The loop.
            make_stage: Returns the stage that validates on one of `--valid_sets`, by name.
            has_main: Whether there is also one with the name "", which is always due.
        """
        config = self._config
        stages = [make_stage("")] if has_main else []
        for name, valid_set in valid_sets.parse_sets(config.valid_sets).items():
            every = 1 if config.dry_run else valid_set.every
            due = EveryChecks(every, config.check_every_steps, loop.n_steps)
            stages.append(when(due, make_stage(name)))
        validate = serial(*stages)
        return (lambda checkpoint: as_summary(validate(checkpoint))) if stages else None

    @functools.cached_property
    def layout(self) -> Layout | None:
        """The layout of the run."""
        return layout_lib.layout_of(self._run)

    def pattern(self, kind: Kind) -> str:
        """Returns the pattern of the data; raises `UsageError` if its flag is missing."""
        pattern = getattr(self._config, f"{kind}_pattern")
        if pattern is None:
            raise UsageError(f"No {kind} data: set --{kind}_pattern=PATTERN.")
        return pattern

    def batch_size(self, kind: Kind) -> int:
        """Returns the number of rows in a full batch."""
        return getattr(self._config, f"{kind}_batch_size")

    def n_examples(self, kind: Kind) -> int:
        """Returns how many examples to use; negative: all of them."""
        return -1 if kind == "train" else getattr(self._config, f"num_{kind}_examples")

    def train_batches(self, seed: int, *, mark_first: bool) -> MarkFirst:
        """Returns the stream of training batches of this process.

        Args:
            seed: Seed of the shuffle.
            mark_first: Whether to mark the first of each group of consecutive batches.
        """
        config = self._config
        sizes, lengths = self._schedules()
        # The same part of every batch, if all can be divided.
        shards = [processes.shard(self.layout, n, "train_batch_size") for n in sizes.values()]
        source = self.source("train")
        # Worker processes import the model file, of which they may call functions.
        with experiment.beside(getattr(self._run.module, "__file__", None)):
            stream = source.batches(
                sizes,
                length=lengths,
                seed=seed,
                shuffle=config.train_shuffle_buf,
                epochs=config.train_epochs,
                consecutive=config.train_consecutive,
                shard=shards[0],
                workers=config.data_workers,
            )
        n_consecutive = config.train_consecutive or 0 if mark_first else 0
        return MarkFirst(stream, n_consecutive, allow_changes=config.allow_data_changes)

    def _schedules(self) -> tuple[dict[int, int], dict[int, int] | None]:
        """Returns the rows and the length of batches, by the step from which on they hold."""
        config, first = self._config, self._config.train_batch_size
        names = [n for n in ("batch_schedule", "length_schedule") if getattr(config, n) is not None]
        if names and config.train_consecutive:
            raise UsageError(
                f"--{names[0]}: the rows of --train_consecutive={config.train_consecutive} batches "
                "continue one another, so their number and length cannot change."
            )
        try:
            tables = {n: parse_table(f"--{n}", getattr(config, n)) for n in names}
            sizes = {0: first, **tables.get("batch_schedule", {})}
            if sizes[0] != first:
                raise UsageError(
                    f"--batch_schedule has {sizes[0]} rows at step 0: set --train_batch_size="
                    f"{sizes[0]}, which is {first}."
                )
            for name, table in {**tables, "batch_schedule": sizes}.items():
                Schedule.of(f"--{name}", table)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return sizes, tables.get("length_schedule")


def with_valid_metrics(summary: Summary, name: str, metrics: Mapping[str, float]) -> Summary:
    """Adds validation metrics to those of training: valid_loss, or valid_NAME_loss of a set.

    Raises:
        UsageError: If a set has the metric of another one.
    """
    train = summary.metrics.get("train", {})
    renamed = {f"{valid_sets.prefix(name)}{metric}": value for metric, value in metrics.items()}
    taken = sorted(renamed.keys() & train.keys())
    if name and taken:
        raise UsageError(
            f"--valid_sets: there is already a metric {taken[0]}. Give the set {name} another name."
        )
    return summary.with_metrics("train", {**train, **renamed})


def program_of(run: Run, mode: Mode) -> Program:
    """Returns the program for the model file of a run.

    Raises:
        UsageError: If the file is not a model file.
    """
    module = run.module
    # Imported here: a process needs only one of the two forms.
    if hasattr(module, "experiment"):
        from tekoa.estimator.model_file.short import ShortProgram

        return ShortProgram(run)
    if hasattr(module, "get_train_state") or hasattr(module, "get_infer_state"):
        from tekoa.estimator.jestimator.program import LongProgram

        return LongProgram(run, mode)
    raise UsageError(
        f"{module.__name__} is not a model file: it defines neither experiment(config, data) nor "
        "get_train_state(config, rng)."
    )
