"""Trains the lanes of a sweep: builds their loops, drives them in turn, stops some of them.

All runs are trained by the code of `tekoa train`. Those whose steps differ in numbers only share
their programs (`loop/lanes`). The lanes that are behind always run first, so that all reach the
same step together, also after a restart that found them at different ones.
"""

import contextlib
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tekoa.core import nonfinite
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.modes import train
from tekoa.estimator.run import run as runs
from tekoa.estimator.sweep.grid import Lane
from tekoa.estimator.sweep.record import SweepRecord, rungs
from tekoa.hosts.signals import StopFlag
from tekoa.loop.checkpoint import as_summary
from tekoa.loop.lanes import group
from tekoa.loop.lanes.machine import How
from tekoa.store.commit import paths
from tekoa.store.formats import index

# The metric by which lanes are compared: the first of these that a run reports.
_METRICS = ("valid_loss", "loss", "train_loss", "last_loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What a sweep looks for.

    Attributes:
        metric: The metric by which lanes are compared; None for the validation loss, or the
            training loss if there is no validation.
        is_max: Whether the highest value is the best.
    """

    metric: str | None = None
    is_max: bool = False

    @classmethod
    def parse(cls, text: str | None) -> "Goal":
        """Parses METRIC or METRIC:max.

        >>> Goal.parse('valid_test_accuracy:max')
        Goal(metric='valid_test_accuracy', is_max=True)
        """
        name, _, mode = (text or "").partition(":")
        if mode not in ("", "min", "max"):
            raise UsageError(f"--metric must be METRIC, METRIC:min or METRIC:max, got {text!r}.")
        return cls(metric=name or None, is_max=mode == "max")

    def rank(self, value: float | None) -> float:
        """Returns a number that is lower for better values."""
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.is_max else value

    def pick(self, metrics: dict[str, float]) -> tuple[str, float | None]:
        """Returns the name and the value of the metric; None if a run has not reported it."""
        names = _METRICS if self.metric is None else (self.metric,)
        name = next((name for name in names if name in metrics), names[0])
        return name, metrics.get(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one lane.

    Attributes:
        lane: The lane.
        directory: The directory of its run.
        step: Its last checkpoint.
        metric: The metric by which lanes are compared.
        value: Its value at that checkpoint; None if there is none.
        stopped: Why it was stopped; empty if it was not.
    """

    lane: Lane
    directory: pathlib.Path
    step: int
    metric: str
    value: float | None
    stopped: str = ""


@dataclasses.dataclass
class _Training:
    """A lane that is being trained."""

    lane: Lane
    steps: Iterator[train.Progress]
    progress: train.Progress
    metrics: dict[str, float]

    @property
    def step(self) -> int:
        return self.progress.loop.step

    def leave(self) -> None:
        """Ends the lane; the others go on without it."""
        runner = self.progress.loop.parts[1]
        if isinstance(runner.group, group.LaneGroup):
            runner.group.end(runner)
        self.steps.close()  # pyright: ignore[reportAttributeAccessIssue] - a generator


class Sweep:
    """The training of all lanes.

    Args:
        config: The flags that all lanes have in common.
        lanes: The lanes.
        directory: The directory of the sweep.
        goal: How lanes are compared.
        how: How lanes with the same program run.
        is_halving: Whether the worse half of the lanes is stopped several times.
        report: Prints a line.
    """

    def __init__(
        self,
        config: RunConfig,
        lanes: Sequence[Lane],
        directory: pathlib.Path,
        *,
        goal: Goal,
        how: How = "auto",
        is_halving: bool = False,
        report: Callable[[str], Any] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        self._config, self._lanes, self._directory = config, lanes, directory
        self._goal, self._report = goal, report
        self._how: How = how
        self._is_halving = is_halving
        self._record = SweepRecord.read(directory)

    def train(self, stop_flag: StopFlag) -> None:
        """Trains all lanes to their end, or until a stop is requested."""
        with contextlib.ExitStack() as stack:
            running = [
                self._open(lane, stop_flag, stack)
                for lane in self._lanes
                if lane.name not in self._record.stopped
            ]
            if not running:
                return
            self._record.remove_leftovers()  # The leases of the lanes keep other sweeps out.
            first = running[0].progress.loop
            if first.n_steps is None:
                raise UsageError("A sweep needs an end: set --max_train_steps or --train_epochs.")
            self._announce(group.join([t.progress.loop for t in running], self._how), running)
            decisions: dict[int, int] = {}
            if self._is_halving:
                decisions = rungs(len(self._lanes), first.n_steps, first.n_steps_per_checkpoint)
            while running:
                if not stop_flag.is_set():  # Else all save what they have, and end.
                    running = self._halve(running, decisions)
                step = min(training.step for training in running)
                behind = [training for training in running if training.step == step]
                ended = [training for training in behind if not self._advance(training)]
                running = [training for training in running if training not in ended]
                if running and not stop_flag.is_set():
                    self._report_step(running)

    def outcomes(self) -> list[Outcome]:
        """Reads the results of all lanes: best first, then those that were stopped, last first."""
        outcomes = [self._outcome(lane) for lane in self._lanes]

        def order(outcome: Outcome) -> tuple[bool, int, float]:
            is_stopped = bool(outcome.stopped)
            return is_stopped, -outcome.step if is_stopped else 0, self._goal.rank(outcome.value)

        return sorted(outcomes, key=order)

    def _outcome(self, lane: Lane) -> Outcome:
        directory = self._directory / lane.name
        step, metrics = _stored_metrics(directory)
        name, value = self._goal.pick(metrics)
        stopped = self._record.stopped.get(lane.name, "")
        return Outcome(
            lane=lane, directory=directory, step=step, metric=name, value=value, stopped=stopped
        )

    def _open(self, lane: Lane, stop_flag: StopFlag, stack: contextlib.ExitStack) -> _Training:
        run = runs.open_run(lane.config(self._config, self._directory))
        steps = train.training(run, program_of(run, "train"), stop_flag, stdout=False)
        stack.callback(steps.close)  # pyright: ignore[reportAttributeAccessIssue] - a generator
        progress = next(steps)
        metrics = _stored_metrics(run.model_dir)[1] if progress.loop.step else {}
        return _Training(lane, steps, progress, metrics)

    def _advance(self, training: _Training) -> bool:
        """Trains a lane up to its next check; returns whether it goes on after that."""
        before = training.step
        try:
            while training.step == before:
                training.progress = next(training.steps)
                if training.progress.last is not None:
                    training.metrics = dict(as_summary(training.progress.last).metrics["train"])
        except StopIteration:
            training.leave()
            return False
        except nonfinite.NonFiniteError as error:
            step = training.step + 1
            self._stop(training, f"NaN or Inf at step {step}")
            self._report(f"{training.lane.name}: {error}")
            return False
        return True

    def _stop(self, training: _Training, reason: str) -> None:
        self._record.stopped[training.lane.name] = reason
        self._record.write()
        training.leave()

    def _halve(self, running: list[_Training], decisions: dict[int, int]) -> list[_Training]:
        """Stops the worse lanes if that is due, and returns the others."""
        step = min(training.step for training in running)
        due = [s for s in decisions if s <= step and s not in self._record.halved]
        if not due:
            return running
        n = min(decisions[s] for s in due)
        ranked = sorted(running, key=lambda t: self._goal.rank(self._goal.pick(t.metrics)[1]))
        for training in ranked[n:]:
            self._record.stopped[training.lane.name] = f"in the worse half at step {step}"
        # In one file: a restart finds the decision as a whole, or makes it again.
        self._record.halved += due
        self._record.write()
        for training in ranked[n:]:
            training.leave()
        return [training for training in running if training in ranked[:n]]

    def _announce(self, groups: list[list[int]], running: Sequence[_Training]) -> None:
        together = [indices for indices in groups if len(indices) > 1]
        alone = len(groups) - len(together)
        n = len(running)
        if n == 1:
            return
        for indices in together:
            runner = running[indices[0]].progress.loop.parts[1]
            assert isinstance(runner.group, group.LaneGroup)
            words = {
                "turn": "in turn with one program",
                "vmap": "side by side in one program",
            }[runner.group.how]
            self._report(f"{len(indices)} of {n} runs train {words}.")
        if alone:
            self._report(
                f"{alone} of {n} runs train by themselves: their programs differ in more than "
                "numbers, such as in shapes."
            )

    def _report_step(self, running: Sequence[_Training]) -> None:
        step = min(training.step for training in running)
        best = min(running, key=lambda t: self._goal.rank(self._goal.pick(t.metrics)[1]))
        name, value = self._goal.pick(best.metrics)
        text = "" if value is None else f", best {name} {value:.4g} ({best.lane.name})"
        n_stopped = len(self._record.stopped)
        stopped = f", {n_stopped} stopped" if n_stopped else ""
        total = best.progress.loop.n_steps
        runs_text = "1 run" if len(running) == 1 else f"{len(running)} runs"
        self._report(f"Step {step} of {total}: {runs_text}{stopped}{text}.")


def _stored_metrics(directory: pathlib.Path) -> tuple[int, dict[str, float]]:
    """Returns the newest step of a run and its metrics of training; nothing if there is none."""
    steps = paths.list_steps(directory)
    if not steps:
        return 0, {}
    path = paths.step_dir(directory, steps[-1])
    metrics = index.read_index(path).metrics if (path / paths.INDEX).exists() else {}
    prefix = "train/"
    return steps[-1], {
        k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)
    }
