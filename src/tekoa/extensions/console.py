"""ConsoleLogger: prints each checkpoint's time and metrics."""

import math
from collections.abc import Callable

from tekoa import hosts
from tekoa.loop.checkpoint import Checkpoint, Summary


class ConsoleLogger:
    """Prints the size of the model once, then each checkpoint's time and metrics.

    Args:
        write: Called with each line; prints it by default.
    """

    def __init__(self, write: Callable[[str], object] | None = None):
        self._write = write or (lambda line: print(line, flush=True))
        self._is_first = True

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the lines of one checkpoint, in process 0 only."""
        if not hosts.current().is_writer:
            return checkpoint
        if self._is_first:
            self._is_first = False
            self._write_setup(checkpoint)
        step = f"Step {checkpoint.step}:"
        self._write(
            f"{step} Ran {checkpoint.n_completed_steps} train steps in "
            f"{checkpoint.elapsed_time:.2f} seconds"
        )
        if isinstance(checkpoint, Summary):
            for line in _table(checkpoint):
                self._write(f"{step} {line}")
        return checkpoint

    def _write_setup(self, checkpoint: Checkpoint) -> None:
        setup = checkpoint.setup
        if "load_seconds" in setup:
            loaded = setup["load_seconds"]
            text = f"Loaded in {loaded:.2f} seconds, initialised" if loaded else "Initialised"
            self._write(f"{text} in {setup['init_seconds']:.2f} seconds")
        if "n_weights" in setup:
            self._write(
                f"Number of trainable weights: {int(setup['n_weights']):,} "
                f"({setup['n_bytes'] / 1e6:.2f} MB)"
            )


SummaryLogger = ConsoleLogger


def _table(summary: Summary) -> list[str]:
    rows = [
        (group, name, value)
        for group, values in summary.metrics.items()
        for name, value in values.items()
    ]
    if not rows:
        return []
    group_width = max(len(group) for group, _, _ in rows)
    name_width = max(len(name) for _, name, _ in rows)
    return [
        f"{group:<{group_width}} {name:<{name_width}} | {_format(value)}"
        for group, name, value in rows
    ]


def _format(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:.8f}" if 1e-4 <= abs(value) < 1e7 else f"{value:.4e}"
