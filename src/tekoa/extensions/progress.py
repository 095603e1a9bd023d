"""ProgressBar: a bar on a terminal or in a notebook, plain lines elsewhere."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, TextIO

from tekoa import hosts
from tekoa.loop import train_metrics
from tekoa.loop.checkpoint import Checkpoint, as_summary

_SECONDS_BETWEEN_MOVES = 0.1
_BLOCKS = "▁▂▃▄▅▆▇█"
# Fewer points make no curve.
_MIN_POINTS = 4
_MAX_NOTES = 2
# Of a number in a line; wider ones widen all that follow.
_NUMBER_WIDTH = 7
# Of the bar, on terminals that are narrow and wide.
_BAR_WIDTHS = (12, 24)
_WIDE = 110
# Shorter compilations are not worth a line.
_MIN_COMPILE_SECONDS = 0.1


class ProgressBar:
    """Shows steps, rates, time left, the loss and the first metrics of validation.

    The last line is a small curve of the losses; not in notebooks, which have pictures.

    Args:
        n_steps: Total number of steps, or None if unknown.
        file: Where to write; standard error by default.
        seconds_between_lines: Minimum time between two lines if there is no terminal.
        examples_per_step: Rows of a batch; by default those of the loop's first one. If its
            inputs are tokens, these are counted instead.
        lines: Whether to print a line for every checkpoint, above the bar; not in notebooks.
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
        self._last_line = self._last_move = -float("inf")
        self._note, self._number_width = "", _NUMBER_WIDTH
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
        values = _values(checkpoint)
        rates = self._rates(checkpoint)
        shown = [f"{name.removeprefix('train ')} {x:.4g}" for name, x in values.items()]
        # The loss of training, and the first metrics of validation.
        notes = [*shown[:1], *rates, *shown[1 : 1 + _MAX_NOTES]]
        note = self._note = "  ".join(self._fitting(notes))
        for name, value in values.items():
            if name.endswith(" loss"):
                self._losses.setdefault(name, []).append(value)
        is_interactive = self._is_interactive()
        if checkpoint.compile_time >= _MIN_COMPILE_SECONDS and not self._console.is_jupyter:
            self._print(f"Compiled in {checkpoint.compile_time:.1f} s.")
        if is_interactive:
            self._update_bar(checkpoint.step, note)
        if self._has_lines and not self._console.is_jupyter:
            rates = [] if is_interactive else rates  # The bar has them.
            if values or rates:
                line = self._aligned(checkpoint.step, values)
                self._print("  ".join([line, *rates]).rstrip())
        elif not is_interactive:
            self._print_now_and_then(checkpoint.step, note)
        if checkpoint.step == self._n_steps:
            self.close()
        return checkpoint

    def _print_now_and_then(self, step: int, note: str) -> None:
        now = time.monotonic()
        if now - self._last_line >= self._min_seconds or step == self._n_steps:
            self._last_line = now
            self._print(f"step {self._step_text(step).strip()}  {note}")

    def _rates(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the speed of the steps alone, without compiling, validating and saving."""
        seconds = checkpoint.elapsed_time - checkpoint.compile_time
        if not checkpoint.n_completed_steps or seconds <= 0:
            return []
        rate = checkpoint.n_completed_steps / seconds
        n_examples = self._examples_per_step or checkpoint.setup.get("n_rows")
        n_tokens = None if self._examples_per_step else checkpoint.setup.get("n_tokens")
        rates = [f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s"]
        if n := n_tokens or n_examples:
            rates.append(f"{rate * n:,.0f} {'tokens' if n_tokens else 'examples'}/s")
        return rates

    def _fitting(self, notes: list[str]) -> list[str]:
        """Returns as many notes as fit beside the bar on a terminal."""
        if not self._console.is_terminal:
            return notes
        # Steps, time left, and a space after each column.
        n_left = self._console.width - self._bar_width - len(self._step_text(0)) - len(" 0:00:00  ")
        ends = itertools.accumulate(len(note) + 2 for note in notes)
        return [note for note, end in zip(notes, ends, strict=True) if end - 2 <= n_left]

    @property
    def _bar_width(self) -> int:
        return _BAR_WIDTHS[self._console.width >= _WIDE]

    def _aligned(self, step: int, values: dict[str, float]) -> str:
        """Returns one line; numbers are as wide in all lines."""
        numbers = {name: short_number(x, _NUMBER_WIDTH) for name, x in values.items()}
        self._number_width = max([self._number_width, *map(len, numbers.values())])
        texts = (f"{name} {text:<{self._number_width}}" for name, text in numbers.items())
        return f"step {self._step_text(step)}  {'  '.join(texts)}"

    def _step_text(self, step: int) -> str:
        total = "" if self._n_steps is None else f"/{self._n_steps}"
        return f"{step:>{len(total) - 1 if total else 1}}{total}"

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar on screen, draws the losses and releases the terminal."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        losses = {} if self._console.is_jupyter else self._losses
        curves = {name: x for name, x in losses.items() if len(x) >= _MIN_POINTS}
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
            progress.BarColumn(self._bar_width),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
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
        # In a block: outside of one, Markdown converters misplace the spaces.
        html = f"<div><progress{value}></progress>&ensp;{text.replace('  ', '&ensp;')}</div>"
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


def short_number(x: float, width: int) -> str:
    """Returns a number with at most four significant digits, in `width` characters and a sign.

    >>> [short_number(x, 7) for x in (2.30259, 0.035854, 0.0095694, 0.0000374, 123456.7)]
    ['2.303', '0.03585', '0.00957', '3.7e-05', '123457']
    """
    text = f"{x:.4g}"
    if len(text.removeprefix("-")) <= width:
        return text
    shorter = f"{x:.{width - 2}f}" if abs(x) < 1 else f"{x:.0f}"
    is_close = abs(x) >= 10 ** (3 - width) and len(shorter.removeprefix("-")) <= width
    return shorter if is_close else f"{x:.1e}"


def _values(checkpoint: Checkpoint) -> dict[str, float]:
    """Returns the metrics of training, the loss first, and then those of validation."""
    groups = as_summary(checkpoint).metrics
    train = {k: x for k, x in groups.get("train", {}).items() if k not in train_metrics.DIAGNOSTICS}
    loss = train.pop("loss", train.pop("train_loss", None))
    others = {f"train {k}": x for k, x in train.items() if not k.startswith("valid_")}
    validation = {k.replace("_", " ", 1): x for k, x in train.items() if k.startswith("valid_")}
    for group, metrics in groups.items():
        if group not in ("train", "rates", "system"):
            validation |= {f"{group} {name}": x for name, x in metrics.items()}
    return {**({} if loss is None else {"train loss": loss}), **validation, **others}
