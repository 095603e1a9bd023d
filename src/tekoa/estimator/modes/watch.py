"""`tekoa eval_wait`: evaluates every checkpoint of a training run once, oldest first.

The name of a checkpoint is recorded after its points are written to TensorBoard and, if it
is the best, it is copied. A watcher that is killed and restarted resumes after the recorded
checkpoint. The TensorBoard writer drops all points after it, so that none appears twice.
"""

import contextlib
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from tekoa import hosts
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import run as runs
from tekoa.extensions import tensorboard
from tekoa.store import errors
from tekoa.store.commit import durable, paths, score, together
from tekoa.store.read import hold
from tekoa.store.transfer import copy

NOTE = "last_evaluated_ckpt"

Evaluate = Callable[[str, Any], dict[str, float]]


class _Best:
    """The directory with the best checkpoints of a metric, and their score."""

    def __init__(self, metric: str, directory: pathlib.Path, mode: Literal["min", "max"]):
        self.metric, self.directory = metric, directory
        self.score = score.BestScore(directory / "score", mode=mode)


class Watcher:
    """Evaluates the steps of a directory as they are written.

    Args:
        run: The run to watch.
        evaluate: `evaluate(path, stop_flag)` returns the metrics of a step.
        stop_flag: Polled while waiting and evaluating.
    """

    def __init__(self, run: runs.Run, evaluate: Evaluate, stop_flag: Any):
        self._config, self._model_dir = run.config, run.model_dir
        self._evaluate, self._stop_flag = evaluate, stop_flag
        self._eval_dir = run.model_dir / run.config.eval_label
        self._group = hosts.current()
        together.run_on_writer(self._group, "opening of the evaluation", self._make_eval_dir)
        self._last = self._read_last()
        self._failed: set[int] = set()
        self._has_evaluated = self._has_waited = False
        self._points = tensorboard.ScalarWriter(self._eval_dir)
        self._label = run.config.eval_label.split("/")[0]
        self._best = [
            *(_Best(m, self._eval_dir / f"high_{m}", "max") for m in run.config.save_high),
            *(_Best(m, self._eval_dir / f"low_{m}", "min") for m in run.config.save_low),
        ]

    def _make_eval_dir(self) -> None:
        self._eval_dir.mkdir(parents=True, exist_ok=True)
        hold.sweep(self._eval_dir)

    def run(self, report: Callable[[int, dict[str, float]], None]) -> None:
        """Evaluates until training has ended, or until a stop is requested."""
        try:
            for step in self._steps():
                metrics = self._evaluate_step(step)
                if metrics is not None:
                    report(step, metrics)
        finally:
            self._points.close()

    def _steps(self) -> Iterator[int]:
        """Yields the steps to evaluate; process 0 finds them and broadcasts them."""
        new_steps = self._new_steps() if self._group.is_writer else iter(())
        while True:
            step = next(new_steps, None)
            step = self._group.broadcast("next step to evaluate", step, timeout_seconds=math.inf)
            if step is None:
                return
            yield step

    def _new_steps(self) -> Iterator[int]:
        """Yields the oldest step not yet evaluated; waits for new ones until training ends."""
        while not self._stop_flag.is_requested():
            # Checked before listing: a step written before the end mark is then in the list.
            has_ended = self._has_ended()
            steps = paths.list_steps(self._model_dir)
            new = [step for step in steps if step > self._last and step not in self._failed]
            if new:
                self._report_removed(new[0])
                yield new[0]
            elif has_ended:
                return
            else:
                self._report_waiting()
                self._sleep()

    def _has_ended(self) -> bool:
        """Returns whether training has ended, or step `--max_train_steps` is evaluated."""
        n_steps = self._config.max_train_steps
        is_complete = n_steps is not None and self._last >= n_steps
        return is_complete or runs.last_step(self._model_dir) is not None

    def _evaluate_step(self, step: int) -> dict[str, float] | None:
        try:
            with contextlib.ExitStack() as stack:
                path = self._hold(step, stack)
                metrics = self._evaluate(str(path), self._stop_flag)
                self._check_metrics(metrics)
                self._write_points(step, metrics)
                if self._group.is_writer:
                    self._copy_if_best(path, metrics)
        except (errors.StepGoneError, errors.DamagedError) as error:
            print(f"Step {step} cannot be evaluated: {error}", flush=True)
            self._failed.add(step)
            return None
        self._last = step
        if self._group.is_writer:
            name = str(paths.step_dir(self._model_dir, step))
            durable.replace(self._eval_dir / NOTE, name.encode())
        return metrics

    def _hold(self, step: int, stack: contextlib.ExitStack) -> pathlib.Path:
        """Prevents the removal of a step while the processes evaluate it."""
        pinned = hold.pinned(self._model_dir, step, self._eval_dir)
        path = together.run_on_writer(
            self._group, f"hold of step {step}", lambda: str(stack.enter_context(pinned))
        )
        return pathlib.Path(path)

    def _write_points(self, step: int, metrics: dict[str, float]) -> None:
        self._points.resume_from(self._last)
        for name, value in metrics.items():
            self._points.add(f"{self._label}/{name}", value, step)
        self._points.flush()

    def _check_metrics(self, metrics: dict[str, float]) -> None:
        """Raises UsageError if the first evaluation lacks a metric set by the flags."""
        missing = [best.metric for best in self._best if best.metric not in metrics]
        if missing and not self._has_evaluated:
            raise UsageError(
                f"--save_high or --save_low names an unknown metric: {', '.join(missing)}. "
                f"Available metrics: {', '.join(metrics)}."
            )
        self._has_evaluated = True

    def _copy_if_best(self, path: pathlib.Path, metrics: dict[str, float]) -> None:
        """Copies the step if a metric is the best so far, then writes the score."""
        for best in self._best:
            if best.metric not in metrics:
                names = ", ".join(metrics)
                print(f"No metric {best.metric!r} at {path.name}; available: {names}.", flush=True)
            elif best.score.is_better(metrics[best.metric]):
                copy.copy_step(path, best.directory, keep=self._config.max_save)
                best.score.record(metrics[best.metric])

    def _report_removed(self, step: int) -> None:
        every = runs.read_facts(self._model_dir).get("flags", {}).get("check_every_steps")
        if every and self._last >= 0:
            expected = range((self._last // every + 1) * every, step, every)
            removed = [n for n in expected if n not in self._failed]
            if removed:
                print(f"Steps {removed} were removed before they could be evaluated.", flush=True)

    def _report_waiting(self) -> None:
        if not self._has_waited:
            text = f"Waiting for the next checkpoint in {self._model_dir}."
            print(text, file=sys.stderr, flush=True)
        self._has_waited = True

    def _sleep(self) -> None:
        end = time.monotonic() + self._config.check_ckpt_every_secs
        while time.monotonic() < end and not self._stop_flag.is_requested():
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))

    def _read_last(self) -> int:
        """Returns the last step that was evaluated; -1 if there is none."""
        try:
            text = (self._eval_dir / NOTE).read_text()
        except FileNotFoundError:
            return -1
        step = paths.parse_step(pathlib.Path(text).name)
        if step is None:
            raise UsageError(f"{self._eval_dir / NOTE} must name a checkpoint, got {text[:60]!r}.")
        return step
