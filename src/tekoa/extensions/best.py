"""Keeps the checkpoint with the best value of a metric, over restarts too."""

import os
import pathlib
from typing import Any, Literal

from tekoa.extensions import files
from tekoa.loop.checkpoint import Checkpoint
from tekoa.store import best, retention, store

Mode = Literal["min", "max"]
_WORDS: dict[Mode, str] = {"min": "low", "max": "high"}


def best_dir(output_dir: str | os.PathLike[str], metric: str, group: str, mode: Mode) -> str:
    """Where the best checkpoints of a metric are; writer and reader ask the same.

    >>> best_dir('run', 'loss', 'eval', 'min')
    'run/low_eval_loss'
    """
    if mode not in _WORDS:
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")
    return str(pathlib.Path(output_dir) / f"{_WORDS[mode]}_{group}_{metric}")


class BestFileWriter:
    """Stores a checkpoint only if its metric is better than any before.

    Args:
        directory: Where the best checkpoints and their score are kept.
        metric: Name of the metric. NaN and infinity are never best.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        group: The metric's group.
        keep: How many of the best to keep.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        *,
        mode: Mode,
        group: str = "eval",
        keep: int = 1,
    ):
        self._name = f"{group}/{metric}"
        self._store = store.Store(directory, keep=[retention.KeepLast(keep)])
        self._score = best.Score(pathlib.Path(directory) / "score", mode=mode)

    @property
    def best(self) -> float | None:
        """The best value so far; None if there is none."""
        return self._score.value

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Stores one checkpoint if it is the best.

        Raises:
            KeyError: If the checkpoint has no such metric.
        """
        # The score is written when its checkpoint is on disk; the next must see it.
        self._store.wait()
        metrics = files.flat_metrics(checkpoint)
        if self._name not in metrics:
            raise KeyError(
                f"The best checkpoint is asked for by {self._name!r}; this one has "
                f"{sorted(metrics)}. Put the EvalLoop before this stage."
            )
        value = metrics[self._name]
        if self._score.is_better(value):
            files.save(self._store, checkpoint, lambda _: self._score.record(value))
        return checkpoint

    def wait(self) -> None:
        """Waits until what was given is on disk."""
        self._store.wait()

    def close(self) -> None:
        """Waits until what was given is on disk, and lets other writers in."""
        self._store.close()


def LowestCheckpointFileWriter(  # noqa: N802
    output_dir: str | os.PathLike[str], metric: str, *, group: str = "eval", keep: int = 1
) -> BestFileWriter:
    """Keeps the checkpoint with the lowest value of a metric, below `output_dir`."""
    return _writer(output_dir, metric, group=group, keep=keep, mode="min")


def HighestCheckpointFileWriter(  # noqa: N802
    output_dir: str | os.PathLike[str], metric: str, *, group: str = "eval", keep: int = 1
) -> BestFileWriter:
    """Keeps the checkpoint with the highest value of a metric, below `output_dir`."""
    return _writer(output_dir, metric, group=group, keep=keep, mode="max")


def LowestCheckpointFileReader(  # noqa: N802
    input_dir: str | os.PathLike[str], target: Any, metric: str, *, group: str = "eval"
) -> files.CheckpointFileReader:
    """Initialises a loop from the checkpoint with the lowest value of a metric."""
    return files.CheckpointFileReader(best_dir(input_dir, metric, group, "min"), target)


def HighestCheckpointFileReader(  # noqa: N802
    input_dir: str | os.PathLike[str], target: Any, metric: str, *, group: str = "eval"
) -> files.CheckpointFileReader:
    """Initialises a loop from the checkpoint with the highest value of a metric."""
    return files.CheckpointFileReader(best_dir(input_dir, metric, group, "max"), target)


def _writer(
    output_dir: str | os.PathLike[str], metric: str, *, group: str, keep: int, mode: Mode
) -> BestFileWriter:
    directory = best_dir(output_dir, metric, group, mode)
    return BestFileWriter(directory, metric, mode=mode, group=group, keep=keep)
