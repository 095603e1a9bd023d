"""A run of `fit`: what it opens and closes, and how it trains to the end or to a stop."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekoa import hosts
from tekoa.extensions import checkpoint_files, metrics_file, monitor, progress, run_record, serial
from tekoa.extensions import tensorboard as tensorboard_lib
from tekoa.extensions.early_stop import Stopping
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.fitting import explain
from tekoa.fitting import settings as settings_lib
from tekoa.fitting.checks import Checks
from tekoa.fitting.history import History
from tekoa.hosts import signals
from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.train import TrainLoop
from tekoa.store.mirror import mirror
from tekoa.store.read import newest


@dataclasses.dataclass(kw_only=True)
class Run:
    """An open run.

    Attributes:
        directory: Where its files are, or None.
        settings: The settings of this start.
        show_progress: As for `fit`.
        stop_flag: Set by Ctrl-C and SIGTERM.
        trackers: Receive the metrics of every checkpoint.
        writers: Write every checkpoint.
        step: Completed optimizer steps when training ended.
        is_complete: Whether training has reached its end.
    """

    directory: pathlib.Path | None
    settings: Mapping[str, Any]
    show_progress: bool
    stop_flag: signals.StopFlag
    trackers: Sequence[Tracker]
    writers: Sequence[serial.Stage]
    step: int = 0
    is_complete: bool = False

    def resumable(self, model: Any) -> Any:
        """Returns the model, or a reader around it if there may be a checkpoint to resume from."""
        if self.directory is None:
            return model
        # A reader traces the initialisation once more. Other processes may see files late.
        is_alone = hosts.current().count == 1
        if is_alone and newest.newest_valid(self.directory, lambda path: path) is None:
            return model
        return checkpoint_files.CheckpointFileReader(self.directory, model)

    def train(self, loop: TrainLoop, checks: Checks, callback: serial.Stage) -> History:
        """Trains to the end or to a stop; at every checkpoint, each stage receives it in turn."""
        if self.show_progress:
            explain.print_notes(loop, checks.metrics.keys() - {"loss"}, checks.sets)
        watch = monitor.Monitor(loop)
        stoppings = checks.stoppings(loop, self.directory)
        with contextlib.ExitStack() as stack:
            logs = self._logs(loop, stack)
            stages = [
                *checks.validations(loop, watch),
                watch,
                *self._bar(loop, stack),
                callback,
                *logs,
                *checks.best_writers(loop, self.directory, self.show_progress, stack),
                *checks.when_due(loop, stoppings),
                *self.trackers,
            ]
            writers = [watch.timed("save", writer) for writer in self.writers]
            with contextlib.suppress(InterruptedError):  # A validation was interrupted.
                self._iterate(loop, stages, writers, [stage for _, stage in stoppings])
            self.step, self.is_complete = loop.step, not self.stop_flag.is_set()
            if not self.is_complete:
                advice = "" if self.directory is None else " Call fit again to resume."
                print(f"Stopped at step {loop.step}.{advice}")
            return History(logs[0].rows)

    def _bar(self, loop: TrainLoop, stack: contextlib.ExitStack) -> list[progress.ProgressBar]:
        """Returns the progress bar, if there is one."""
        if not self.show_progress:
            return []
        bar = progress.ProgressBar(loop.n_steps, lines=True)
        loop.before_dispatch = bar.advance
        return [stack.enter_context(contextlib.closing(bar))]

    def _logs(self, loop: TrainLoop, stack: contextlib.ExitStack) -> list[Any]:
        """Returns the stages that record the metrics; the first one has their rows."""
        if self.directory is None:
            return [_Rows()]
        path = self.directory
        logs = [
            metrics_file.MetricsFile(path / metrics_file.FILE_NAME),
            tensorboard_lib.TensorBoardWriter(path / "train"),
        ]
        for log in logs:
            log.discard_after(loop.step)
            stack.enter_context(contextlib.closing(log))
        return logs

    def _iterate(
        self,
        loop: TrainLoop,
        stages: Sequence[serial.Stage],
        writers: Sequence[serial.Stage],
        stoppings: Sequence[Stopping],
    ) -> None:
        """Trains, unless there is nothing to do, and says why training ended before its end.

        Raises:
            InterruptedError: If a validation was interrupted; its checkpoint is saved.
        """
        if self.directory is not None:
            owed = checkpoint_files.owed(self.directory, loop.checkpoint())
            if owed is not None:
                serial.serial(*stages)(owed)
        reasons = [stopping.reason for stopping in stoppings if stopping.should_stop]
        if reasons or (loop.n_steps is not None and loop.step >= loop.n_steps):
            why = "; ".join(reasons) or f"all {loop.step} steps are complete"
            if self.show_progress:
                print(f"Nothing to do: {why}.")
            for tracker in self.trackers:
                tracker.send_missing(loop.step)
            return
        if self.directory is not None and self.show_progress and loop.step:
            lines = settings_lib.changes(self.directory, self.settings, loop.facts)
            title = [f"Changed at step {loop.step}, since the last start:"] if lines else []
            print(*title, *lines, sep="\n  ", end="\n" if lines else "")
        for checkpoint in loop:
            checkpoint_files.process(checkpoint, stages, writers)
        for stopping in stoppings:
            if stopping.should_stop and self.show_progress:
                print(f"Stopped early at step {loop.step}: {stopping.reason}.")


class _Rows:
    """Collects the metrics of a run without a directory."""

    def __init__(self):
        self.rows: list[dict[str, Any]] = []

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        self.rows.append(metrics_file.row_of(checkpoint))
        return checkpoint


@contextlib.contextmanager
def open_run(
    directory: str | os.PathLike[str] | None,
    *,
    track: str | Tracker | Sequence[str | Tracker] = (),
    settings: Mapping[str, Any],
    show_progress: bool = True,
) -> Iterator[Run]:
    """Opens a run; at the end its files are complete, and the trackers are closed.

    Args:
        directory: As for `fit`. If it is a URL, the run has a working copy of it.
        track: As for `fit`.
        settings: Recorded in `run.json` and by trackers.
        show_progress: As for `fit`.
    """
    with contextlib.ExitStack() as outer:
        path = None if directory is None else outer.enter_context(mirror.mirrored(directory))
        with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
            # Closed after the writer, when the last step is committed.
            trackers = [
                item if isinstance(item, Tracker) else Tracker(item, path, config=settings)
                for item in ([track] if isinstance(track, str | Tracker) else track)
            ]
            for tracker in trackers:
                stack.enter_context(contextlib.closing(tracker))
            run = Run(
                directory=path,
                settings=settings,
                show_progress=show_progress,
                stop_flag=stop_flag,
                trackers=trackers,
                writers=[] if path is None else [_writer(path, settings, stack)],
            )
            yield run
        if path is not None and run.is_complete and hosts.current().is_writer:
            run_record.write_end(path, run.step)


def _writer(
    directory: pathlib.Path, settings: Mapping[str, Any], stack: contextlib.ExitStack
) -> checkpoint_files.CheckpointFileWriter:
    """Opens the checkpoint writer; a second trainer of the directory is refused here."""
    writer = checkpoint_files.CheckpointFileWriter(directory)
    writer.settings = dict(settings)
    if hosts.current().is_writer:
        run_record.remove_end(directory)
    return stack.enter_context(contextlib.closing(writer))
