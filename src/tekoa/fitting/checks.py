"""What `fit` does at every checkpoint: validates, logs, keeps the best, and stops early."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tekoa.core.loss.reduction import reported_loss
from tekoa.extensions import best_files, early_stop, monitor, serial
from tekoa.extensions.early_stop import Stopping
from tekoa.fitting import metric_names
from tekoa.fitting.data.dataset import Dataset
from tekoa.loop.train import TrainLoop
from tekoa.loop.triggers import EveryChecks

_GROUP = "eval"
Best = tuple[str, metric_names.Mode]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """What happens at every checkpoint.

    Attributes:
        metrics: The metrics of validation, by name.
        loss: The loss of training.
        sets: The validation data by name; a single data set has the name "".
        batch_size: Rows per batch.
        every: The number of checks between two validations, by the name of the data set.
        best: The metric by which the best checkpoint is kept, and its mode.
        patience: As for `fit`.
        stop_when: As for `fit`.
    """

    loss: Callable[..., Any] | None
    metrics: dict[str, Callable[..., Any]]
    sets: Mapping[str, Dataset]
    batch_size: int
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
        batch_size: int,
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
            functions = {"loss": reported_loss(loss), **functions}
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
            best = (best, metric_names.best_mode(best))
        checks = cls(
            loss=loss,
            metrics=functions,
            sets=sets,
            batch_size=batch_size,
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
            raise ValueError(
                f"{argument}={name!r} is not a metric of the validation, which measures "
                f"{', '.join(names)}. Name one of these, or add it to metrics=[...]."
            )

    @property
    def batches(self) -> dict[str, Iterable[Any]]:
        """The validation batches by the name of the data set."""
        return {name: data.eval_batches(self.batch_size) for name, data in self.sets.items()}

    def stoppings(
        self, loop: TrainLoop, directory: pathlib.Path | None
    ) -> list[tuple[str, Stopping]]:
        """Returns what may end training early, as of the step that the loop resumes from.

        Each with the name of the data set whose metric it reads.
        """
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
                path=directory and directory / "early_stop.json",
            )
            stoppings.append((data_set, early))
        if self.stop_when is not None:
            name, comparison, bound = early_stop.parse_condition(self.stop_when)
            data_set, group, metric = _parts(name)
            reached = early_stop.StopWhen(
                f"{metric}{comparison}{bound!r}",
                group=group,
                stop=loop.stop,
                path=directory and directory / "stop_when.json",
            )
            stoppings.append((data_set, reached))
        for _, stopping in stoppings:
            stopping.resume(loop.step)
        return stoppings

    def validations(self, loop: TrainLoop, watch: monitor.Monitor) -> list[serial.Stage]:
        """Returns the stages that validate, one for each data set."""
        stages = []
        for name, batches in self.batches.items() if self.metrics else ():
            evaluate = loop.evaluation(
                self.metrics,
                batches,
                split=self.sets[name].split,
                label="/".join(filter(None, (_GROUP, name))),
                stop_flag=loop.stop_flag,
            )
            stages.append((name, watch.timed("validation", evaluate)))
        return self.when_due(loop, stages)

    def best_writers(
        self,
        loop: TrainLoop,
        directory: pathlib.Path | None,
        show_progress: bool,
        stack: contextlib.ExitStack,
    ) -> list[serial.Stage]:
        """Returns the stage that keeps the best checkpoint, if there is one."""
        if directory is None or self.best is None or not self.metrics:
            return []
        name, mode = self.best
        data_set, group, metric = _parts(name)
        writer = best_files.BestFileWriter(
            directory, metric, mode=mode, group=group, stdout=show_progress
        )
        stack.enter_context(contextlib.closing(writer))
        return self.when_due(loop, [(data_set, writer)])

    def when_due(
        self, loop: TrainLoop, stages: Iterable[tuple[str, serial.Stage]]
    ) -> list[serial.Stage]:
        """Returns stages that run only when the data set that each is named with is validated."""

        def due(name: str) -> EveryChecks:
            every, stop_flag = loop.n_steps_per_checkpoint, loop.stop_flag
            return EveryChecks(self.every[name], every, loop.n_steps, stop_flag)

        return [serial.when(due(name), stage) for name, stage in stages]


def _intervals(every: int | Mapping[str, int], sets: Mapping[str, Any]) -> dict[str, int]:
    intervals = every if isinstance(every, Mapping) else dict.fromkeys(sets, every)
    if unknown := sorted(set(intervals) - set(sets)):
        raise ValueError(
            f"validate_every names {', '.join(unknown)}, but the validation data is "
            f"{', '.join(sets) or 'not set'}."
        )
    for name, n in intervals.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            of_set = f"[{name!r}]" if name else ""
            raise ValueError(f"validate_every{of_set} must be a number from 1 up, got {n!r}.")
    return {name: intervals.get(name, 1) for name in sets}


def _parts(name: str) -> tuple[str, str, str]:
    """Returns data set, group and metric of a name such as 'loss' or 'clean/loss'.

    >>> _parts('clean/loss'), _parts('loss')
    (('clean', 'eval/clean', 'loss'), ('', 'eval', 'loss'))
    """
    data_set, _, metric = name.rpartition("/")
    return data_set, "/".join(filter(None, (_GROUP, data_set))), metric
