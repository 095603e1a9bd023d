"""What `fit` does at every checkpoint: validates, logs, keeps the best, and stops early."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tekoa.extensions import best_files, early_stop, metrics_file, monitor, progress, serial
from tekoa.extensions import tensorboard as tensorboard_lib
from tekoa.extensions.early_stop import Stopping
from tekoa.fitting import metric_names
from tekoa.fitting.inputs import Dataset
from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.train import TrainLoop

_GROUP = "eval"
Best = tuple[str, metric_names.Mode]


@dataclasses.dataclass(frozen=True)
class _Due:
    """Due at every n-th check, and at the last one of training."""

    loop: TrainLoop
    n: int

    def is_due(self, checkpoint: Checkpoint) -> bool:
        is_last = checkpoint.step == self.loop.n_steps
        return (
            self.n == 1
            or is_last
            or not (checkpoint.step % (self.n * self.loop.n_steps_per_checkpoint))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """What happens at every checkpoint.

    Attributes:
        metrics: The metrics of validation, by name.
        loss: The loss of training.
        sets: The validation data by name; a single data set has the name "".
        every: The number of checks between two validations, by the name of the data set.
        best: The metric by which the best checkpoint is kept, and its mode.
        patience: As for `fit`.
        stop_when: As for `fit`.
    """

    loss: Callable[..., Any] | None
    metrics: dict[str, Callable[..., Any]]
    sets: Mapping[str, Dataset]
    every: Mapping[str, int]
    best: Best | None
    patience: int | None
    stop_when: str | None

    @classmethod
    def of(
        cls,
        loss: Callable[..., Any] | None,
        metrics: Any,
        sets: Mapping[str, Dataset],
        *,
        validate_every: int | Mapping[str, int],
        best: str | Best | None,
        patience: int | None,
        stop_when: str | None,
        directory: Any,
    ) -> "Checks":
        """Checks the arguments of `fit` and fills in their defaults.

        Raises:
            ValueError: If they contradict one another, or a name is unknown.
        """
        functions = metric_names.find_metrics(metrics, loss)
        if loss is not None:
            functions = {"loss": _loss_alone(loss), **functions}
        requested = {"best": best, "patience": patience, "stop_when": stop_when}
        names = [f"{name}=" for name, value in requested.items() if value is not None]
        if names and not sets:
            needs = "need" if len(names) > 1 else "needs"
            raise ValueError(f"{' and '.join(names)} {needs} validation data: pass validation=.")
        if best is not None and directory is None:
            raise ValueError("best= keeps the best checkpoint in a directory: pass directory=.")
        if best is None and sets and "loss" in functions:
            best = "/".join(filter(None, (next(iter(sets)), "loss")))
        if isinstance(best, str):
            best = (best, metric_names.best_mode(best.rpartition("/")[2]))
        checks = cls(
            loss=loss,
            metrics=functions,
            sets=sets,
            every=_intervals(validate_every, sets),
            best=best,
            patience=patience,
            stop_when=stop_when,
        )
        if best is not None:
            checks._check_metric("best", best[0])
        if stop_when is not None:
            checks._check_metric("stop_when", early_stop.parse_condition(stop_when)[0])
        return checks

    def _check_metric(self, argument: str, name: str) -> None:
        data_set, _, metric = name.rpartition("/")
        if data_set not in self.sets or metric not in self.metrics:
            names = ["/".join(filter(None, (x, y))) for x in self.sets for y in self.metrics]
            raise ValueError(f"{argument}={name!r} is not one of the metrics {', '.join(names)}.")

    def batches(self, batch_size: int) -> dict[str, Iterable[Any]]:
        """Returns the validation batches by the name of the data set."""
        return {name: data.eval_batches(batch_size) for name, data in self.sets.items()}

    def stoppings(
        self, loop: TrainLoop, directory: str | os.PathLike[str] | None
    ) -> list[tuple[str, Stopping]]:
        """Returns what may end training early, as of the step that the loop resumes from.

        Each with the name of the data set whose metric it reads.
        """
        path = None if directory is None else pathlib.Path(directory)
        stoppings: list[tuple[str, Stopping]] = []
        if self.patience is not None and self.best is not None:
            name, mode = self.best
            data_set, group, metric = _parts(name)
            early = early_stop.EarlyStopping(
                metric,
                patience=self.patience,
                mode=mode,
                group=group,
                stop=loop.stop,
                path=path and path / "early_stop.json",
            )
            stoppings.append((data_set, early))
        if self.stop_when is not None:
            name, comparison, bound = early_stop.parse_condition(self.stop_when)
            data_set, group, metric = _parts(name)
            reached = early_stop.StopWhen(
                f"{metric}{comparison}{bound!r}",
                group=group,
                stop=loop.stop,
                path=path and path / "stop_when.json",
            )
            stoppings.append((data_set, reached))
        for _, stopping in stoppings:
            stopping.resume(loop.step)
        return stoppings

    def stages(
        self,
        loop: TrainLoop,
        stoppings: Sequence[tuple[str, Stopping]],
        directory: str | os.PathLike[str] | None,
        batch_size: int,
        show_progress: bool,
        watch: monitor.Monitor,
        callbacks: Sequence[serial.Stage],
        stack: contextlib.ExitStack,
    ) -> tuple[Callable[[], list[dict[str, Any]]], list[serial.Stage]]:
        """Returns a function that returns the rows of the history, and the stages."""
        stages: list[Any] = []
        for name, batches in self.batches(batch_size).items() if self.metrics else ():
            label = "/".join(filter(None, (_GROUP, name)))
            evaluate = loop.evaluation(self.metrics, batches, label=label, stop_flag=loop.stop_flag)
            stages.append(self._when_due(loop, name, watch.timed("validation", evaluate)))
        stages.append(watch)
        if show_progress:
            bar = progress.ProgressBar(loop.n_steps, lines=True)
            loop.before_dispatch = bar.advance
            stages.append(stack.enter_context(contextlib.closing(bar)))
        stages += callbacks
        stopping = [self._when_due(loop, name, stage) for name, stage in stoppings]
        if directory is None:
            rows: list[dict[str, Any]] = []
            return lambda: rows, [*stages, *stopping, _collect(rows)]
        path = pathlib.Path(directory)
        file = metrics_file.MetricsFile(path / metrics_file.FILE_NAME)
        closing: list[Any] = [file, tensorboard_lib.TensorBoardWriter(path / "train")]
        for writer in closing:
            writer.discard_after(loop.step)
        stages += [stack.enter_context(contextlib.closing(stage)) for stage in closing]
        if self.best is not None and self.metrics:
            name, mode = self.best
            data_set, group, metric = _parts(name)
            best = best_files.BestFileWriter(
                path, metric, mode=mode, group=group, stdout=show_progress
            )
            stack.enter_context(contextlib.closing(best))
            stages.append(self._when_due(loop, data_set, best))
        return lambda: file.rows, [*stages, *stopping]

    def _when_due(self, loop: TrainLoop, data_set: str, stage: serial.Stage) -> serial.Stage:
        return serial.when(_Due(loop, self.every[data_set]), stage)


def _intervals(every: int | Mapping[str, int], sets: Mapping[str, Any]) -> dict[str, int]:
    given = every if isinstance(every, Mapping) else dict.fromkeys(sets, every)
    if unknown := sorted(set(given) - set(sets)):
        raise ValueError(
            f"validate_every names {', '.join(unknown)}, but the validation data is "
            f"{', '.join(sets) or 'not set'}."
        )
    for name, n in given.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"validate_every must be a number from 1 up, got {n!r} {name}".strip())
    return {name: given.get(name, 1) for name in sets}


def _parts(name: str) -> tuple[str, str, str]:
    """Returns data set, group and metric of a name such as 'loss' or 'clean/loss'.

    >>> _parts('clean/loss'), _parts('loss')
    (('clean', 'eval/clean', 'loss'), ('', 'eval', 'loss'))
    """
    data_set, _, metric = name.rpartition("/")
    return data_set, "/".join(filter(None, (_GROUP, data_set))), metric


def _collect(rows: list[dict[str, Any]]) -> serial.Stage:
    def collect(checkpoint: Any) -> Any:
        rows.append(metrics_file.row_of(checkpoint))
        return checkpoint

    return collect


def _loss_alone(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss to report: the metric "loss" that a loss function returns, or its value."""

    def value(*args: Any) -> Any:
        result = loss(*args)
        has_metrics = isinstance(result, tuple) and len(result) == 2
        if has_metrics and isinstance(result[1], Mapping):
            return result[1].get("loss", result[0])
        return result

    return value
