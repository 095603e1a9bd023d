"""A progress bar on a terminal, plain lines elsewhere."""

import time
from typing import Any, TextIO

from tekoa.loop.checkpoint import Checkpoint, as_summary


class ProgressBar:
    """Shows steps, rate, time left and loss.

    Args:
        n_steps: Steps in total; None: not known.
        file: Where to write; standard error by default.
        seconds_between_lines: Where there is no terminal, the least time between two lines.
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
        self._pause = seconds_between_lines
        self._bar: Any = None
        self._start: tuple[float, int] | None = None
        self._last_line = -float("inf")

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Moves the bar to this checkpoint."""
        now = time.monotonic()
        if self._start is None:
            begun = checkpoint.step - checkpoint.n_completed_steps
            self._start = now - checkpoint.elapsed_time, begun
        rate = (checkpoint.step - self._start[1]) / max(now - self._start[0], 1e-9)
        loss = as_summary(checkpoint).metrics.get("train", {}).get("loss")
        note = "" if loss is None else f"loss {loss:.4g}"
        if self._console.is_terminal:
            self._move_bar(checkpoint.step, f"{rate:.0f} steps/s  {note}")
        elif now - self._last_line >= self._pause or checkpoint.step == self._n_steps:
            self._last_line = now
            total = "" if self._n_steps is None else f"/{self._n_steps}"
            self._console.print(
                f"step {checkpoint.step}{total}  {rate:.0f} steps/s  {note}", highlight=False
            )
        if checkpoint.step == self._n_steps:
            self.close()
        return checkpoint

    def close(self) -> None:
        """Leaves the bar as it is and gives the terminal back."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _move_bar(self, step: int, note: str) -> None:
        if self._bar is None:
            self._bar = self._new_bar()
        progress, task = self._bar
        progress.update(task, completed=step, note=note)

    def _new_bar(self) -> tuple[Any, Any]:
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
