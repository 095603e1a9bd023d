"""Stops training when a metric has not improved for a while."""

import math
from collections.abc import Callable
from typing import Literal

from tekoa.loop.checkpoint import Checkpoint, as_summary


class EarlyStopping:
    """Asks for a stop after `patience` checkpoints without an improvement.

    Args:
        metric: Name of the metric.
        patience: Checkpoints without improvement after which to stop.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        group: The metric's group.
        min_delta: By how much a value must be better to count.
        stop: Called once when it is time, such as `train_loop.stop`.

    Attributes:
        should_stop: Whether it is time.
        best: The best value so far; None if there was none.
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int,
        mode: Literal["min", "max"] = "min",
        group: str = "eval",
        min_delta: float = 0.0,
        stop: Callable[[], object] | None = None,
    ):
        if patience < 1:
            raise ValueError(f"patience must be 1 or more, got {patience}.")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")
        self._metric, self._group, self._patience = metric, group, patience
        self._sign = 1 if mode == "min" else -1
        self._min_delta, self._stop = min_delta, stop
        self._n_without = 0
        self.best: float | None = None
        self.should_stop = False

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Looks at the metric of one checkpoint.

        Raises:
            KeyError: If the checkpoint has no such metric.
        """
        metrics = as_summary(checkpoint).metrics
        try:
            value = metrics[self._group][self._metric]
        except KeyError:
            raise KeyError(
                f"EarlyStopping looks for {self._group}/{self._metric}; this checkpoint has "
                f"{[f'{g}/{n}' for g, names in metrics.items() for n in names]}."
            ) from None
        if self._is_better(value):
            self.best, self._n_without = value, 0
        else:
            self._n_without += 1
        if self._n_without >= self._patience and not self.should_stop:
            self.should_stop = True
            if self._stop is not None:
                self._stop()
        return checkpoint

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.best is None or self._sign * (self.best - value) > self._min_delta
