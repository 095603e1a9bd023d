"""Stores the checkpoint with the best value of a metric, across restarts."""

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from tekoa import hosts
from tekoa._aliases import accept_aliases
from tekoa.core import files
from tekoa.extensions import checkpoint_files
from tekoa.loop.checkpoint import Checkpoint, find_metric
from tekoa.store import errors, store
from tekoa.store.commit import paths, retention, score, together
from tekoa.store.commit.score import Mode
from tekoa.store.formats import index

_ADJECTIVES: dict[Mode, str] = {"min": "lowest", "max": "highest"}

_log = logging.getLogger("tekoa")


def folder_of(metric: str, group: str, mode: Mode) -> str:
    """Returns the name of the directory of a metric's best checkpoints, for writer and reader.

    >>> folder_of('loss', 'eval/clean', 'min')
    'low_eval_clean_loss'
    """
    score.check_mode(mode)
    return f"{score.PREFIXES[mode]}{group}_{metric}".replace("/", "_")


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
        stdout: Whether to print the best value of an earlier run, which new ones must beat.
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
        stdout: bool = True,
    ):
        path = files.local_path(directory) / folder_of(metric, group, mode)
        self._group, self._metric = group, metric
        rule = _KeepUpToBest(retention.KeepBest(f"{group}/{metric}", mode=mode, n=keep))
        super().__init__(store.Store(path, keep=[rule], keep_newest=False))
        self._score = score.BestScore(path / score.NAME, mode=mode)
        self._store.prune()
        self._score.set(
            together.run_on_writer(
                hosts.current(),
                f"best {group}/{metric} so far",
                lambda: _stored_best(path, rule.best, self._score.value),
            )
        )
        self._name = f"The {_ADJECTIVES[mode]} value of the metric {group}/{metric}"
        if self.best is not None:
            line = f"{self._name} is set to {self.best:.8f}."
            _log.info(line)
            if stdout and hosts.current().is_writer:
                print(line, flush=True)

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
            _log.info("%s is set to %.8f.", self._name, value)
        return checkpoint


@dataclasses.dataclass(frozen=True)
class _KeepUpToBest:
    """Keeps the best steps up to the best one, which readers then find as the newest.

    Steps with higher numbers are from before training returned to an earlier step.
    """

    best: retention.KeepBest

    def select(self, metrics: retention.Metrics) -> Iterable[int]:
        """Returns the steps to keep."""
        steps = list(self.best.select(metrics))
        return [step for step in steps if step <= steps[0]]


def _stored_best(
    directory: pathlib.Path, rule: retention.KeepBest, score_so_far: float | None
) -> float | None:
    """Returns the score of the best step in a directory, as stored with the step itself.

    Between the commit of a step and the change of the score a program may be killed.
    """
    metrics = {}
    steps = paths.list_steps(directory)
    for step in steps:
        with contextlib.suppress(errors.DamagedError):
            metrics[step] = index.read_index(paths.step_dir(directory, step)).metrics
    if not metrics:
        return score_so_far if steps else None
    best = list(rule.select(metrics))
    return metrics[best[0]][rule.metric] if best else score_so_far


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
        super().__init__(files.local_path(directory) / folder_of(metric, group, mode), target)


class LowestCheckpointFileWriter(BestFileWriter):
    """Stores the checkpoint with the lowest value of a metric; see `BestFileWriter`."""

    @accept_aliases(output_dir="directory")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        *,
        group: str = "eval",
        keep: int = 1,
        stdout: bool = True,
    ):
        super().__init__(directory, metric, mode="min", group=group, keep=keep, stdout=stdout)


class HighestCheckpointFileWriter(BestFileWriter):
    """Stores the checkpoint with the highest value of a metric; see `BestFileWriter`."""

    @accept_aliases(output_dir="directory")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        *,
        group: str = "eval",
        keep: int = 1,
        stdout: bool = True,
    ):
        super().__init__(directory, metric, mode="max", group=group, keep=keep, stdout=stdout)


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
