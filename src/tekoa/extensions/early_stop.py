"""Stops training when a metric has not improved for a while."""

import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Literal

from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.store import files


class EarlyStopping:
    """Asks for a stop after `patience` checkpoints without an improvement.

    Args:
        metric: Name of the metric.
        patience: Checkpoints without improvement after which to stop.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        group: The metric's group.
        min_delta: By how much a value must be better to count.
        stop: Called once when it is time, such as `train_loop.stop`.
        path: A file that keeps what was seen: a run that goes on after a restart is then as
            patient as one that never stopped.

    Raises:
        ValueError: If an option is wrong, or the file holds something else.

    Attributes:
        should_stop: Whether it is time.
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
        path: str | os.PathLike[str] | None = None,
    ):
        if patience < 1:
            raise ValueError(f"patience must be 1 or more, got {patience}.")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")
        self._metric, self._group, self._patience = metric, group, patience
        self._sign = 1 if mode == "min" else -1
        self._min_delta, self._stop = min_delta, stop
        self._path = None if path is None else pathlib.Path(path)
        self._seen = {} if self._path is None else _read(self._path)
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
        # A run that goes on from an older step comes here again.
        earlier = {step: old for step, old in self._seen.items() if step < checkpoint.step}
        self._seen = {**earlier, checkpoint.step: float(value)}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._path, json.dumps(self._seen).encode())
        if self._best_and_since()[1] >= self._patience and not self.should_stop:
            self.should_stop = True
            if self._stop is not None:
                self._stop()
        return checkpoint

    @property
    def best(self) -> float | None:
        """The best value so far; None if there was none."""
        return self._best_and_since()[0]

    def _best_and_since(self) -> tuple[float | None, int]:
        """Gives the best value and how many came after it without an improvement."""
        best, n_since = None, 0
        for value in self._seen.values():
            if math.isfinite(value) and (
                best is None or self._sign * (best - value) > self._min_delta
            ):
                best, n_since = value, 0
            else:
                n_since += 1
        return best, n_since


def _read(path: pathlib.Path) -> dict[int, float]:
    try:
        found = json.loads(path.read_text())
        return {int(step): float(value) for step, value in found.items()}
    except FileNotFoundError:
        return {}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold what EarlyStopping has seen: {error}") from None
