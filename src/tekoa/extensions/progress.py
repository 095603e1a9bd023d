"""ProgressBar: a bar on a terminal, plain lines elsewhere."""

import time
from typing import Any, TextIO

from tekoa import hosts
from tekoa.loop.checkpoint import Checkpoint, as_summary

_SECONDS_BETWEEN_MOVES = 0.1


class ProgressBar:
    """Shows steps, rate, time left and loss.

    Args:
        n_steps: Total number of steps, or None if unknown.
        file: Where to write; standard error by default.
        seconds_between_lines: Minimum time between two lines if there is no terminal.
    """

    def __init__(
        self,
        n_steps: int | None = None,
        *,
        file: TextIO | None = None,
        seconds_between_lines: float = 10.0,
    ):
        import rich.console

        self._n_steps = n_steps
        self._console = rich.console.Console(file=file, stderr=file is None)
        self._min_seconds = seconds_between_lines
        self._bar: Any = None
        self._previous: tuple[float, int] | None = None
        self._last_line = self._last_move = -float("inf")
        self._note = ""

    def advance(self, step: int) -> None:
        """Moves the bar between checkpoints; a hook for `TrainLoop.before_dispatch`."""
        now = time.monotonic()
        if now - self._last_move >= _SECONDS_BETWEEN_MOVES and self._is_interactive():
            self._last_move = now
            self._update_bar(step, self._note)

    def _is_interactive(self) -> bool:
        can_redraw = self._console.is_terminal or self._console.is_jupyter
        return can_redraw and hosts.current().is_writer

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Advances the bar to this checkpoint, in process 0 only."""
        if not hosts.current().is_writer:
            return checkpoint
        now = time.monotonic()
        rate = self._rate(checkpoint, now)
        metrics = as_summary(checkpoint).metrics.get("train", {})
        loss = metrics.get("loss", metrics.get("train_loss"))
        notes = [f"{rate:.3g} steps/s"] if rate > 0 else []
        notes += [] if loss is None else [f"loss {loss:.4g}"]
        note = self._note = "  ".join(notes)
        if self._is_interactive():
            self._update_bar(checkpoint.step, note)
        elif now - self._last_line >= self._min_seconds or checkpoint.step == self._n_steps:
            self._last_line = now
            total = "" if self._n_steps is None else f"/{self._n_steps}"
            self._console.print(f"step {checkpoint.step}{total}  {note}", highlight=False)
        if checkpoint.step == self._n_steps:
            self.close()
        return checkpoint

    def _rate(self, checkpoint: Checkpoint, now: float) -> float:
        """Returns the steps per second since the previous checkpoint."""
        start = now - checkpoint.elapsed_time, checkpoint.step - checkpoint.n_completed_steps
        then, step = self._previous or start
        self._previous = now, checkpoint.step
        return (checkpoint.step - step) / max(now - then, 1e-9)

    def close(self) -> None:
        """Leaves the bar on screen and releases the terminal."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _update_bar(self, step: int, note: str) -> None:
        if self._bar is None:
            self._bar = self._start_bar()
        progress, task = self._bar
        progress.update(task, completed=step, note=note)

    def _start_bar(self) -> tuple[Any, Any]:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=self._console,
        )
        bar.start()
        return bar, bar.add_task("training", total=self._n_steps, note="")
