"""Stores the checkpoint with the best value of a metric, across restarts."""

import os
import pathlib
from typing import Any, Literal

from tekoa._aliases import accept_aliases
from tekoa.extensions import checkpoint_files
from tekoa.loop.checkpoint import Checkpoint, find_metric
from tekoa.store import store
from tekoa.store.commit import retention, score

Mode = Literal["min", "max"]
_WORDS: dict[Mode, str] = {"min": "low", "max": "high"}


def best_dir(directory: str | os.PathLike[str], metric: str, group: str, mode: Mode) -> str:
    """Returns the directory of a metric's best checkpoints, for writer and reader.

    >>> best_dir('run', 'loss', 'eval', 'min')
    'run/low_eval_loss'
    """
    if mode not in _WORDS:
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")
    return str(pathlib.Path(directory) / f"{_WORDS[mode]}_{group}_{metric}")


class BestFileWriter(checkpoint_files.StoreWriter):
    """Stores a checkpoint only if its metric is better than in all earlier ones.

    The checkpoints and their score are stored in a subdirectory such as `low_eval_loss`.

    Args:
        directory: The parent directory, which several metrics may share. `output_dir=` is an
            alias.
        metric: Name of the metric. NaN and infinity are never best.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        group: The metric's group.
        keep: Number of the best checkpoints to keep.
    """

    @accept_aliases(output_dir="directory")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        *,
        mode: Mode,
        group: str = "eval",
        keep: int = 1,
    ):
        path = best_dir(directory, metric, group, mode)
        self._group, self._metric = group, metric
        super().__init__(store.Store(path, keep=[retention.KeepLast(keep)]))
        self._score = score.BestScore(pathlib.Path(path) / "score", mode=mode)

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._score.value

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Stores the checkpoint if it is the best so far.

        Raises:
            LookupError: If the checkpoint has no such metric.
        """
        # The score is written once its checkpoint is on disk; the next call must see it.
        self._store.wait()
        value = find_metric(checkpoint, self._group, self._metric)
        if self._score.is_better(value):
            # A step of the same number belongs to another history: its score was worse.
            checkpoint_files.save(
                self._store, checkpoint, lambda _: self._score.record(value), replace=True
            )
        return checkpoint


class BestFileReader(checkpoint_files.CheckpointFileReader):
    """Initialises a `TrainLoop` from the checkpoint with the best value of a metric.

    If there is none, the loop starts from scratch.

    Args:
        directory: As for `BestFileWriter`. `input_dir=` and `dir=` are aliases.
        metric: Name of the metric.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        target: The model to initialise from scratch: anything that `TrainLoop` accepts.
        group: The metric's group.
    """

    @accept_aliases(input_dir="directory", dir="directory")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        *,
        mode: Mode,
        target: Any,
        group: str = "eval",
    ):
        super().__init__(best_dir(directory, metric, group, mode), target)


class LowestCheckpointFileWriter(BestFileWriter):
    """Stores the checkpoint with the lowest value of a metric; see `BestFileWriter`."""

    @accept_aliases(output_dir="directory")
    def __init__(
        self, directory: str | os.PathLike[str], metric: str, *, group: str = "eval", keep: int = 1
    ):
        super().__init__(directory, metric, mode="min", group=group, keep=keep)


class HighestCheckpointFileWriter(BestFileWriter):
    """Stores the checkpoint with the highest value of a metric; see `BestFileWriter`."""

    @accept_aliases(output_dir="directory")
    def __init__(
        self, directory: str | os.PathLike[str], metric: str, *, group: str = "eval", keep: int = 1
    ):
        super().__init__(directory, metric, mode="max", group=group, keep=keep)


class LowestCheckpointFileReader(BestFileReader):
    """Initialises a loop from the lowest value of a metric; see `BestFileReader`."""

    @accept_aliases(input_dir="directory", dir="directory")
    def __init__(
        self, directory: str | os.PathLike[str], target: Any, metric: str, *, group: str = "eval"
    ):
        super().__init__(directory, metric, mode="min", target=target, group=group)


class HighestCheckpointFileReader(BestFileReader):
    """Initialises a loop from the highest value of a metric; see `BestFileReader`."""

    @accept_aliases(input_dir="directory", dir="directory")
    def __init__(
        self, directory: str | os.PathLike[str], target: Any, metric: str, *, group: str = "eval"
    ):
        super().__init__(directory, metric, mode="max", target=target, group=group)
