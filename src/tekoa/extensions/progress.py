"""ProgressBar: a bar on a terminal or in a notebook, plain lines elsewhere."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, TextIO

from tekoa import hosts
from tekoa.loop.checkpoint import Checkpoint, as_summary

_SECONDS_BETWEEN_MOVES = 0.1
_BLOCKS = "▁▂▃▄▅▆▇█"
# Fewer points make no curve.
_MIN_POINTS = 4
_MAX_NOTES = 2


class ProgressBar:
    """Shows steps, rates, time left, the loss and the first metrics of validation.

    The last line is a small curve of the losses.

    Args:
        n_steps: Total number of steps, or None if unknown.
        file: Where to write; standard error by default.
        seconds_between_lines: Minimum time between two lines if there is no terminal.
        examples_per_step: If set, examples per second are shown too.
        lines: Whether to print a line for every validation, above the bar; not in notebooks.
    """

    def __init__(
        self,
        n_steps: int | None = None,
        *,
        file: TextIO | None = None,
        seconds_between_lines: float = 10.0,
        examples_per_step: int | None = None,
        lines: bool = False,
    ):
        import rich.console

        self._n_steps = n_steps
        self._console = rich.console.Console(file=file, stderr=file is None)
        self._min_seconds = seconds_between_lines
        self._bar: Any = None
        self._previous: tuple[float, int] | None = None
        self._last_line = self._last_move = -float("inf")
        self._note = ""
        self._examples_per_step = examples_per_step
        self._has_lines = lines
        self._losses: dict[str, list[float]] = {}

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
        loss, validation = _losses(checkpoint)
        note = self._note = "  ".join(self._notes(self._rate(checkpoint, now), loss, validation))
        for name, value in [("train loss", loss), *validation.items()]:
            if value is not None and name.endswith("loss"):
                self._losses.setdefault(name, []).append(value)
        if self._is_interactive():
            self._update_bar(checkpoint.step, note)
            if self._has_lines and validation and not self._console.is_jupyter:
                self._print(_aligned(self._step_text(checkpoint.step), loss, validation))
        elif self._has_lines and validation:
            self._print(_aligned(self._step_text(checkpoint.step), loss, validation))
        elif now - self._last_line >= self._min_seconds or checkpoint.step == self._n_steps:
            self._last_line = now
            self._print(f"step {self._step_text(checkpoint.step).strip()}  {note}")
        if checkpoint.step == self._n_steps:
            self.close()
        return checkpoint

    def _notes(self, rate: float, loss: float | None, validation: dict[str, float]) -> list[str]:
        notes = [f"{rate:.3g} steps/s"] if rate > 0 else []
        if rate > 0 and self._examples_per_step is not None:
            notes.append(f"{rate * self._examples_per_step:,.0f} examples/s")
        notes += [] if loss is None else [f"loss {loss:.4g}"]
        return notes + [f"{name} {x:.4g}" for name, x in list(validation.items())[:_MAX_NOTES]]

    def _step_text(self, step: int) -> str:
        total = "" if self._n_steps is None else f"/{self._n_steps}"
        return f"{step:>{len(total) - 1 if total else 1}}{total}"

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _rate(self, checkpoint: Checkpoint, now: float) -> float:
        """Returns the steps per second since the previous checkpoint."""
        start = now - checkpoint.elapsed_time, checkpoint.step - checkpoint.n_completed_steps
        then, step = self._previous or start
        self._previous = now, checkpoint.step
        return (checkpoint.step - step) / max(now - then, 1e-9)

    def close(self) -> None:
        """Leaves the bar on screen, draws the losses and releases the terminal."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        curves = {name: x for name, x in self._losses.items() if len(x) >= _MIN_POINTS}
        for name, values in curves.items():
            text = f"{sparkline(values)}  {values[0]:.4g} to {values[-1]:.4g}"
            self._print(f"{name:<{max(map(len, curves))}}  {text}")
        self._losses = {}

    def _update_bar(self, step: int, note: str) -> None:
        if self._bar is None:
            self._bar = self._start_bar()
        progress, task = self._bar
        progress.update(task, completed=step, note=note)

    def _start_bar(self) -> tuple[Any, Any]:
        if self._console.is_jupyter:
            return _NotebookBar(self._n_steps), None
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


class _NotebookBar:
    """A bar in a notebook: one output that is redrawn, and stays in the stored file."""

    def __init__(self, n_steps: int | None):
        self._n_steps, self._start = n_steps, time.monotonic()
        self._first: int | None = None
        self._handle: Any = None

    def update(self, task: None, *, completed: int, note: str) -> None:
        """Draws the bar at this step."""
        del task
        from IPython import display

        self._first = completed if self._first is None else self._first
        seconds = time.monotonic() - self._start
        times = f"{_clock(seconds)}"
        if self._n_steps is not None and self._first < completed < self._n_steps:
            left = seconds * (self._n_steps - completed) / (completed - self._first)
            times += f", {_clock(left)} left"
        total = "" if self._n_steps is None else f"/{self._n_steps}"
        text = f"{completed}{total} steps  {times}  {note}"
        value = "" if self._n_steps is None else f' value="{completed}" max="{self._n_steps}"'
        html = f"<progress{value}></progress>&ensp;{text.replace('  ', '&ensp;')}"
        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def stop(self) -> None:
        """The last state of the bar stays."""


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draws values as a line of blocks, on a logarithmic scale if they span a wide range.

    NaN and infinity are gaps. More values than fit are averaged.

    >>> sparkline([1.0, 0.5, 0.25, 0.0])
    '█▅▃▁'
    """
    n_columns = min(width, len(values))
    bounds = [i * len(values) // n_columns for i in range(n_columns + 1)]
    columns = [values[start:end] for start, end in itertools.pairwise(bounds)]
    means = [sum(column) / len(column) for column in columns]
    finite = [x for x in means if math.isfinite(x)]
    if finite and min(finite) > 0 and max(finite) > 50 * min(finite):
        means = [math.log(x) if math.isfinite(x) else x for x in means]
        finite = [x for x in means if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((x - low) * scale)] if math.isfinite(x) else " " for x in means)


def _losses(checkpoint: Checkpoint) -> tuple[float | None, dict[str, float]]:
    """Returns the loss of training, and the metrics of validation."""
    groups = as_summary(checkpoint).metrics
    train = groups.get("train", {})
    loss = train.get("loss", train.get("train_loss"))
    validation = {k.replace("_", " ", 1): x for k, x in train.items() if k.startswith("valid_")}
    for group, metrics in groups.items():
        if group != "train":
            validation |= {f"{group} {name}": x for name, x in metrics.items()}
    return loss, validation


def _aligned(step: str, loss: float | None, validation: dict[str, float]) -> str:
    """Returns one line; numbers are as wide in all lines."""
    values = {} if loss is None else {"train loss": loss}
    numbers = (f"{name} {x:<9.4g}" for name, x in {**values, **validation}.items())
    return f"step {step}  {'  '.join(numbers)}".rstrip()
