"""eval_wait: every checkpoint of a training, oldest first, each evaluated once.

A checkpoint counts as evaluated when its points are in TensorBoard and the best ones are
kept; only then is it noted. A watcher that is killed and started again goes on from the
note, and the TensorBoard writer forgets the points after it: none is there twice.
"""

import contextlib
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from tekoa.core import hosts
from tekoa.estimator import run as runs
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.extensions import tensorboard
from tekoa.store import adopting, best, errors, files, names, pins, together

NOTE = "last_evaluated_ckpt"

Evaluate = Callable[[str, Any], dict[str, float]]


class _Best:
    """Where the best checkpoints of a metric are kept, and how good they are."""

    def __init__(self, metric: str, directory: pathlib.Path, mode: Literal["min", "max"]):
        self.metric, self.directory = metric, directory
        self.score = best.Score(directory / "score", mode=mode)


def _wanted(config: RunConfig) -> list[tuple[str, Literal["min", "max"], tuple[str, ...]]]:
    return [("high", "max", config.save_high), ("low", "min", config.save_low)]


class Watcher:
    """Evaluates the steps of a directory as they come.

    Args:
        run: The run to watch.
        evaluate: `evaluate(path, stop_flag)` gives the metrics of a step.
        stop_flag: Polled while waiting and evaluating.
    """

    def __init__(self, run: runs.Run, evaluate: Evaluate, stop_flag: Any):
        self._config, self._model_dir = run.config, run.model_dir
        self._evaluate, self._stop_flag = evaluate, stop_flag
        self._own = run.model_dir / run.config.eval_label
        self._group = hosts.current()
        together.run_on_writer(self._group, "opening of the evaluation", self._open)
        self._last = self._noted()
        self._left_out: set[int] = set()
        self._has_evaluated = self._has_waited = False
        self._points = tensorboard.PointWriter(self._own)
        self._label = run.config.eval_label.split("/")[0]
        self._best = [
            _Best(name, self._own / f"{word}_{name}", mode)
            for word, mode, metrics in _wanted(run.config)
            for name in metrics
        ]

    def _open(self) -> None:
        self._own.mkdir(parents=True, exist_ok=True)
        pins.sweep(self._own)

    def run(self, report: Callable[[int, dict[str, float]], None]) -> None:
        """Evaluates until the last step is done, or a stop is asked for."""
        try:
            for step in self._steps():
                found = self._one(step)
                if found is not None:
                    report(step, found)
        finally:
            self._points.close()

    def _steps(self) -> Iterator[int]:
        """Yields the steps to evaluate; process 0 looks for them, the others wait for it."""
        coming = self._coming() if self._group.is_writer else iter(())
        while True:
            step = next(coming, None)
            step = self._group.broadcast("next step to evaluate", step, timeout_seconds=math.inf)
            if step is None:
                return
            yield step

    def _coming(self) -> Iterator[int]:
        """Yields the oldest step not yet evaluated; waits for one; ends with the training."""
        while not self._stop_flag.is_asked():
            # Looked at first: a step that comes before the end mark is then in the list.
            has_ended = self._has_ended()
            steps = names.list_steps(self._model_dir)
            after = [n for n in steps if n > self._last and n not in self._left_out]
            if after:
                self._tell_missed(after[0])
                yield after[0]
            elif has_ended:
                return
            else:
                self._say_waiting()
                self._sleep()

    def _has_ended(self) -> bool:
        """Whether the trainer has left its end mark, or the last step wanted is done."""
        wanted = self._config.max_train_steps
        return (wanted is not None and self._last >= wanted) or (
            runs.last_step(self._model_dir) is not None
        )

    def _one(self, step: int) -> dict[str, float] | None:
        try:
            with contextlib.ExitStack() as stack:
                path = self._hold(step, stack)
                found = self._evaluate(str(path), self._stop_flag)
                self._check_kept(found)
                self._write(step, found)
                if self._group.is_writer:
                    self._keep(path, found)
        except (errors.StepGoneError, errors.DamagedError) as error:
            print(f"Step {step} cannot be evaluated: {error}", flush=True)
            self._left_out.add(step)
            return None
        self._last = step
        if self._group.is_writer:
            note = str(names.step_dir(self._model_dir, step))
            files.replace(self._own / NOTE, note.encode())
        return found

    def _hold(self, step: int, stack: contextlib.ExitStack) -> pathlib.Path:
        """Keeps a step from vanishing while the processes evaluate it."""
        pinned = pins.pinned(self._model_dir, step, self._own)
        what = f"hold of step {step}"
        held = together.run_on_writer(self._group, what, lambda: str(stack.enter_context(pinned)))
        return pathlib.Path(held)

    def _write(self, step: int, found: dict[str, float]) -> None:
        self._points.go_on_from(self._last)
        for name, value in found.items():
            self._points.add(f"{self._label}/{name}", value, step)
        self._points.flush()

    def _check_kept(self, found: dict[str, float]) -> None:
        """A metric that the first evaluation does not give is a mistake in the flags."""
        missing = [kept.metric for kept in self._best if kept.metric not in found]
        if missing and not self._has_evaluated:
            raise UsageError(
                f"There is no metric {', '.join(missing)} whose best checkpoints could be kept; "
                f"there are {', '.join(found)}. Correct --save_high or --save_low."
            )
        self._has_evaluated = True

    def _keep(self, path: pathlib.Path, found: dict[str, float]) -> None:
        """Copies the step where a metric is the best so far; the score follows the copy."""
        for kept in self._best:
            if kept.metric not in found:
                text = f"There is no metric {kept.metric!r} to keep; there are {list(found)}."
                print(text, flush=True)
            elif kept.score.is_better(found[kept.metric]):
                adopting.adopt(path, kept.directory, keep=self._config.max_save)
                kept.score.record(found[kept.metric])

    def _tell_missed(self, step: int) -> None:
        every = runs.read_facts(self._model_dir).get("flags", {}).get("check_every_steps")
        if every and self._last >= 0:
            gone = list(range((self._last // every + 1) * every, step, every))
            gone = [n for n in gone if n not in self._left_out]
            if gone:
                print(f"Removed before they could be evaluated: steps {gone}.", flush=True)

    def _say_waiting(self) -> None:
        if not self._has_waited:
            text = f"Waiting for the next checkpoint in {self._model_dir}."
            print(text, file=sys.stderr, flush=True)
        self._has_waited = True

    def _sleep(self) -> None:
        until = time.monotonic() + self._config.check_ckpt_every_secs
        while time.monotonic() < until and not self._stop_flag.is_asked():
            time.sleep(min(0.2, max(0.0, until - time.monotonic())))

    def _noted(self) -> int:
        try:
            text = (self._own / NOTE).read_text()
        except FileNotFoundError:
            return -1
        step = names.parse_step(pathlib.Path(text).name)
        if step is None:
            raise UsageError(f"{self._own / NOTE} holds {text[:60]!r}, not a checkpoint.")
        return step
