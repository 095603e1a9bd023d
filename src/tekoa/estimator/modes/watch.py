"""`tekoa eval_wait`: evaluates every checkpoint of a training run once, oldest first.

A checkpoint is known by the identity of its commit, not by its number: if training returns to an
earlier step and makes later steps again, they are evaluated again, and the evaluations of the old
ones are superseded once `run.json` says that training has returned. An evaluation is recorded in
`evaluations.jsonl` once the checkpoint is copied, if it is the best. Points in TensorBoard follow
from the record. An evaluator that is killed and restarted completes what is missing.
"""

import contextlib
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tekoa import hosts
from tekoa.core import files, messages
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.report import events
from tekoa.estimator.run import run as runs
from tekoa.estimator.run import run_files
from tekoa.estimator.run.evaluations import Evaluation, Evaluations
from tekoa.extensions import run_record, tensorboard
from tekoa.store import errors
from tekoa.store.commit import durable, identity, lease, paths, score, together
from tekoa.store.commit.identity import CommitId
from tekoa.store.mirror import mirror, registry
from tekoa.store.read import hold
from tekoa.store.transfer.best import BestCopies

NOTE = "last_evaluated_ckpt"
RECORD = "evaluations.jsonl"

# The other directories of a run.
_TAKEN = ("train", "save", "profile")
# How long processes wait before they poll for signals together.
_MAX_SLEEP_SECONDS = 2.0
# Longer lists of steps would fill the screen.
_N_NAMED = 12
_UNREADABLE = CommitId(digest="unreadable")

Evaluate = Callable[[str, Any], dict[str, float]]


def check_label(label: str) -> None:
    """Raises `UsageError` if a label cannot be the name of an evaluator's directory."""
    is_name = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", label) is not None
    if not is_name or label in _TAKEN or label.startswith("checkpoint_"):
        raise UsageError(
            f"--eval_label must be a name of letters, digits, '_', '-' and '.', other than "
            f"{', '.join(map(repr, _TAKEN))} and 'checkpoint_...', got {label!r}."
        )


class Watcher:
    """Evaluates the steps of a directory as they are written.

    Args:
        run: The run to watch.
        evaluate: `evaluate(path, stop_flag)` returns the metrics of a step.
        stop_flag: Polled while waiting and evaluating.
        eval_dir: The directory of the results; by default the one in the run.

    Raises:
        UsageError: If the label cannot be used.
        errors.LeaseHeldError: If another process evaluates under this label.
    """

    def __init__(
        self,
        run: runs.Run,
        evaluate: Evaluate,
        stop_flag: Any,
        *,
        eval_dir: pathlib.Path | None = None,
    ):
        check_label(run.config.eval_label)
        self._config, self._model_dir = run.config, run.model_dir
        self._evaluate, self._stop_flag = evaluate, stop_flag
        self._label = run.config.eval_label
        self._eval_dir = eval_dir or runs.subdirectory(run, self._label)
        self._group = hosts.current()
        self._failed: set[tuple[int, str]] = set()
        self._commits: dict[int, tuple[tuple[int, int], CommitId]] = {}
        self._starts: list[tuple[str, int]] = []
        self._has_evaluated = self._has_waited = False
        self._next_check = 0.0
        self._lease: lease.Lease | None = None
        try:
            together.run_on_writer(self._group, "opening of the evaluation", self._open)
        except BaseException:
            self._release()
            raise

    def _open(self) -> None:
        self._lease = lease.acquire(self._eval_dir)
        hold.sweep(self._eval_dir)
        self._evaluations = Evaluations(self._eval_dir / RECORD)
        self._points = tensorboard.ScalarWriter(self._eval_dir)
        self._best: list[tuple[str, BestCopies]] = []
        requested = {"max": self._config.save_high, "min": self._config.save_low}
        for mode, prefix in score.PREFIXES.items():
            for metric in requested[mode]:
                folder = self._eval_dir / f"{prefix}{metric}"
                best = BestCopies(folder, mode=mode, keep=self._config.max_save)
                best.repair()
                self._best.append((metric, best))
        curves = events.read_curves(self._eval_dir)
        self._import_note(curves)
        shown = {point.step for points in curves.values() for point in points}
        self._report_superseded([n for n in self._follow_starts() if n in shown])
        self._repair_points(curves)

    def _follow_starts(self) -> list[int]:
        """Supersedes evaluations of steps that training has left; returns what is new of them."""
        starts = run_record.starts_of(run_files.read_facts(self._model_dir))
        if starts == self._starts:
            return []
        self._starts = starts
        return self._evaluations.follow(starts)

    def _report_superseded(self, steps: list[int]) -> None:
        if steps:
            print(
                f"Training has returned to step {self._starts[-1][1]}: the evaluations of the "
                f"steps {messages.some_of(steps, _N_NAMED)} are superseded.",
                flush=True,
            )

    def _import_note(self, curves: events.Curves) -> None:
        """Records the evaluations of an earlier version, which noted only the last step."""
        note = self._eval_dir / NOTE
        if (self._eval_dir / RECORD).exists() or not note.exists():
            return
        text = files.read_bytes(note, max_bytes=2**16).decode(errors="replace")
        last = paths.parse_step(pathlib.Path(text).name)
        if last is None:
            raise UsageError(f"{note} must name a checkpoint, got {text[:60]!r}.")
        metrics: dict[int, dict[str, float]] = {
            step: {} for step in (*paths.list_steps(self._model_dir), last) if step <= last
        }
        times = dict.fromkeys(metrics, 0.0)
        for tag, points in curves.items():
            for point in points:
                name = tag.removeprefix(f"{self._label}/")
                metrics.setdefault(point.step, {})[name] = point.value
                times[point.step] = point.wall_time
        self._evaluations.append(
            *(
                Evaluation(step=step, commit=CommitId(digest=""), metrics=x, wall_time=times[step])
                for step, x in sorted(metrics.items())
            )
        )

    def _repair_points(self, curves: events.Curves) -> None:
        """Writes all points again if those in the files are not the recorded ones."""
        shown = {
            (tag, point.step, point.commit): np.float32(point.value)
            for tag, points in curves.items()
            for point in points
        }
        recorded = {
            (f"{self._label}/{name}", evaluation.step, evaluation.commit.digest): np.float32(value)
            for evaluation in self._evaluations.current
            for name, value in evaluation.metrics.items()
        }
        # As text, because NaN differs from itself.
        if {key: str(x) for key, x in shown.items()} != {k: str(x) for k, x in recorded.items()}:
            self._show(from_step=0)

    def _show(self, from_step: int) -> None:
        """Replaces the points in TensorBoard at and after a step by the recorded ones."""
        self._points.discard_from(from_step)
        for evaluation in self._evaluations.current:
            if evaluation.step >= from_step:
                self._points.add(
                    {f"{self._label}/{name}": x for name, x in evaluation.metrics.items()},
                    evaluation.step,
                    commit=evaluation.commit.digest,
                    wall_time=evaluation.wall_time,
                )

    def run(self, report: Callable[[int, dict[str, float]], None]) -> None:
        """Evaluates until training has ended, or until a stop is requested."""
        try:
            for step in self._steps():
                metrics = self._evaluate_step(step)
                if metrics is not None:
                    report(step, metrics)
        finally:
            self.close()

    def close(self) -> None:
        """Writes the remaining points and lets others evaluate under this label."""
        if self._lease is not None:
            self._points.close()
        self._release()

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
            with contextlib.suppress(OSError):  # Not empty: there are evaluations.
                self._eval_dir.rmdir()

    def _steps(self) -> Iterator[int]:
        """Yields the steps to evaluate; process 0 finds them and broadcasts them."""
        while not self._stop_flag.is_set():
            step, has_ended = together.run_on_writer(self._group, "next step", self._next_step)
            if step is not None:
                yield step
            elif has_ended:
                return

    def _next_step(self) -> tuple[int | None, bool]:
        """Returns the oldest step not yet evaluated, and whether training has ended.

        Waits for a new step, but not for long: the processes must poll for signals together.
        """
        if time.monotonic() < self._next_check:
            self._sleep()
            return None, False
        mirror.refresh(self._model_dir)
        if superseded := self._follow_starts():
            self._report_superseded(superseded)
            self._show(from_step=superseded[0])
            self._points.flush()
        # Checked before listing: a step written before the end mark is then in the list.
        has_ended = self._has_ended()
        steps = paths.list_steps(self._model_dir)
        new = next((step for step in steps if self._is_new(step)), None)
        if new is not None:
            self._report_removed(new, steps)
        elif not has_ended:
            self._report_waiting()
            self._next_check = time.monotonic() + self._config.check_ckpt_every_secs
        return new, has_ended

    def _is_new(self, step: int) -> bool:
        commit = self._commit_of(step)
        if commit is None or (step, commit.digest) in self._failed:
            return False
        return self._evaluations.is_new(step, commit)

    def _commit_of(self, step: int) -> CommitId | None:
        """Returns the identity of a step; None if the step is gone."""
        path = paths.step_dir(self._model_dir, step)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        # Renaming a directory changes its time.
        signature = status.st_ino, status.st_ctime_ns
        if step not in self._commits or self._commits[step][0] != signature:
            try:
                self._commits[step] = signature, identity.commit_id(path)
            except FileNotFoundError:
                return None
            except (errors.StoreError, PermissionError):
                self._commits[step] = signature, _UNREADABLE  # The evaluation reports why.
        return self._commits[step][1]

    def _has_ended(self) -> bool:
        """Returns whether training has ended, or step `--max_train_steps` is evaluated."""
        n_steps = self._config.max_train_steps
        last = max((evaluation.step for evaluation in self._evaluations.current), default=-1)
        is_complete = n_steps is not None and last >= n_steps
        return is_complete or run_files.last_step(self._model_dir) is not None

    def _evaluate_step(self, step: int) -> dict[str, float] | None:
        known = self._commits.get(step, ((), _UNREADABLE))[1]
        try:
            with contextlib.ExitStack() as stack:
                path = self._hold(step, stack)
                metrics = self._evaluate(str(path), self._stop_flag)
                self._check_metrics(metrics)
                commit = _UNREADABLE
                if self._group.is_writer:
                    commit = identity.commit_id(path)
                    self._copy_if_best(path, metrics)
        except errors.UnreachableError as error:
            print(f"Step {step} cannot be evaluated yet: {error}", flush=True)
            self._next_check = time.monotonic() + self._config.check_ckpt_every_secs
            return None
        except (errors.StepGoneError, errors.DamagedError, PermissionError) as error:
            print(f"Step {step} cannot be evaluated: {error}", flush=True)
            self._failed.add((step, known.digest))
            return None
        if self._group.is_writer:
            self._record(step, commit, metrics)
        return metrics

    def _hold(self, step: int, stack: contextlib.ExitStack) -> pathlib.Path:
        """Prevents the removal of a step while the processes evaluate it."""
        pinned = hold.pinned(self._model_dir, step, self._eval_dir)

        def pin() -> str:
            mirror.complete(paths.step_dir(self._model_dir, step))
            return str(stack.enter_context(pinned))

        return pathlib.Path(together.run_on_writer(self._group, f"hold of step {step}", pin))

    def _record(self, step: int, commit: CommitId, metrics: dict[str, float]) -> None:
        last = max((evaluation.step for evaluation in self._evaluations.current), default=-1)
        evaluation = Evaluation(step=step, commit=commit, metrics=metrics, wall_time=time.time())
        first = self._evaluations.append(evaluation)
        if first is None:
            pass  # Training has left this step meanwhile.
        elif first > last:
            values = {f"{self._label}/{name}": value for name, value in metrics.items()}
            self._points.add(values, step, commit=commit.digest, wall_time=evaluation.wall_time)
        else:
            self._show(from_step=first)
        self._points.flush()
        name = mirror.shown(paths.step_dir(self._model_dir, step))
        durable.replace(self._eval_dir / NOTE, name.encode())
        registry.notify(self._eval_dir)

    def _check_metrics(self, metrics: dict[str, float]) -> None:
        """Raises UsageError if the first evaluation lacks a metric set by the flags."""
        requested = (*self._config.save_high, *self._config.save_low)
        missing = [metric for metric in requested if metric not in metrics]
        if missing and not self._has_evaluated:
            raise UsageError(
                f"--save_high or --save_low names an unknown metric: {', '.join(missing)}. "
                f"Available metrics: {', '.join(metrics)}."
            )
        self._has_evaluated = True

    def _copy_if_best(self, path: pathlib.Path, metrics: dict[str, float]) -> None:
        """Copies the step if a metric is the best so far."""
        for metric, best in self._best:
            if metric not in metrics:
                names = ", ".join(metrics)
                print(f"No metric {metric!r} at {path.name}; available: {names}.", flush=True)
            else:
                best.offer(path, metrics[metric])

    def _report_removed(self, step: int, steps: list[int]) -> None:
        """Reports the steps before `step` that nobody will evaluate any more."""
        every = run_files.read_facts(self._model_dir).get("flags", {}).get("check_every_steps")
        tried = {e.step for e in self._evaluations.current} | {n for n, _ in self._failed}
        earlier = [n for n in tried if n < step]
        if every and earlier:
            expected = range((max(earlier) // every + 1) * every, step, every)
            removed = [n for n in expected if n not in steps]
            if removed:
                print(f"Steps {removed} were removed before they could be evaluated.", flush=True)

    def _report_waiting(self) -> None:
        if not self._has_waited:
            text = f"Waiting for the next checkpoint in {mirror.shown(self._model_dir)}."
            print(text, file=sys.stderr, flush=True)
        self._has_waited = True

    def _sleep(self) -> None:
        end = min(self._next_check, time.monotonic() + _MAX_SLEEP_SECONDS)
        while time.monotonic() < end and not self._stop_flag.is_requested():
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
