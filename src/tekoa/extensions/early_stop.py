"""Stops training when a metric no longer improves."""

import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Literal

from tekoa.core import files
from tekoa.loop.checkpoint import Checkpoint, find_metric
from tekoa.store import errors
from tekoa.store.commit import durable

_MAX_BYTES = 2**26


class EarlyStopping:
    """Requests a stop after `patience` checkpoints without an improvement.

    Args:
        metric: Name of the metric.
        patience: Number of checkpoints without improvement after which to stop.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        group: The metric's group.
        min_delta: By how much a value must be better to count as an improvement.
        stop: Called once when it is time to stop, such as `train_loop.stop`.
        path: A file that stores the values so far, so that a resumed run stops at the same step
            as an uninterrupted one.

    Raises:
        ValueError: If an option is invalid, or the file was not written by `EarlyStopping`.

    Attributes:
        should_stop: Whether it is time to stop.
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
        self._path = None if path is None else files.local_path(path)
        self._values = {} if self._path is None else _read_values(self._path)
        self.should_stop = False

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Records the metric of one checkpoint.

        Raises:
            LookupError: If the checkpoint has no such metric.
        """
        value = find_metric(checkpoint, self._group, self._metric)
        # A run that resumes from an older step repeats later ones.
        earlier = {step: old for step, old in self._values.items() if step < checkpoint.step}
        self._values = {**earlier, checkpoint.step: value}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, json.dumps(self._values).encode())
        if self._best_and_n_since()[1] >= self._patience and not self.should_stop:
            self.should_stop = True
            if self._stop is not None:
                self._stop()
        return checkpoint

    def resume(self, step: int) -> bool:
        """Forgets the values of later steps; returns whether it was time to stop at `step`."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self.should_stop = self._best_and_n_since()[1] >= self._patience
        return self.should_stop

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._best_and_n_since()[0]

    def _best_and_n_since(self) -> tuple[float | None, int]:
        """Returns the best value, and the number of values since then."""
        best, n_since = None, 0
        for value in self._values.values():
            if math.isfinite(value) and (
                best is None or self._sign * (best - value) > self._min_delta
            ):
                best, n_since = value, 0
            else:
                n_since += 1
        return best, n_since


def _read_values(path: pathlib.Path) -> dict[int, float]:
    try:
        values = files.read_json(path, max_bytes=_MAX_BYTES)
        return {int(step): float(value) for step, value in values.items()}
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise  # This is no damage.
    except (OSError, AttributeError, TypeError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.DamagedError(
            f"{path}: was not written by EarlyStopping: {reason}. Restore it from a backup, or "
            "remove it to forget the earlier validations."
        ) from None
