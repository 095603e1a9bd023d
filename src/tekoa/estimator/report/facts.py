"""The facts about a run that the page shows, read from its directory."""

import contextlib
import dataclasses
import os
import pathlib
import time
from typing import Any

from tekoa.estimator.report import events
from tekoa.estimator.report.events import Curves
from tekoa.estimator.run import run_files
from tekoa.store.commit import lease, paths
from tekoa.store.read import inspect


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The best checkpoints of a metric.

    Attributes:
        place: Their directory, relative to the model directory.
        metric: Name of the metric.
        score: The best value, as stored; None if there is none yet.
        step: The step with that value; None if there is none yet.
    """

    place: str
    metric: str
    score: str | None
    step: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The contents of a model directory.

    Attributes:
        directory: The model directory, absolute.
        record: The contents of `run.json`.
        end_step: The step at which training ended; None if it has not.
        is_running: Whether a trainer has renewed its lease recently.
        curves: Scalars by directory of TensorBoard files ("train", "eval" ...), then by tag.
        checkpoints: Checkpoints by directory ("" for the run's own), in order of steps.
        best: The best checkpoints, by metric.
    """

    directory: pathlib.Path
    record: dict[str, Any]
    end_step: int | None
    is_running: bool
    curves: dict[str, Curves]
    checkpoints: dict[str, list[inspect.StepInfo]]
    best: list[Best]

    @property
    def is_empty(self) -> bool:
        """Whether the directory contains no files of a run."""
        return not (self.record or self.curves or self.checkpoints)

    @property
    def step(self) -> int:
        """The last step of any curve or checkpoint."""
        points = [points[-1].step for tags in self.curves.values() for points in tags.values()]
        steps = [info.step for infos in self.checkpoints.values() for info in infos]
        return max([0, *points, *steps])


def gather(directory: pathlib.Path) -> RunFacts:
    """Reads a model directory; a trainer and evaluators may be writing to it.

    Checkpoints are verified by file size only; `tekoa inspect` reads every byte.
    """
    folders = _folders(directory)
    curves = {place: events.read_curves(folder) for place, folder in folders.items()}
    checkpoints = {place: _steps_of(folder) for place, folder in folders.items()}
    return RunFacts(
        directory=directory,
        record=run_files.read_facts(directory),
        end_step=run_files.last_step(directory),
        is_running=_is_running(directory),
        curves={place: by_tag for place, by_tag in curves.items() if by_tag},
        checkpoints={place: steps for place, steps in checkpoints.items() if steps},
        best=[_best(p, f) for p, f in folders.items() if f.name.startswith(("high_", "low_"))],
    )


def _folders(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns all directories of a run except checkpoints, by relative path ("" for itself)."""
    folders = [directory]
    for folder, subfolders, _ in os.walk(directory):
        subfolders[:] = [n for n in subfolders if not n.startswith(("checkpoint_", "."))]
        folders += [pathlib.Path(folder, n) for n in subfolders]
    return {"/".join(f.relative_to(directory).parts): f for f in sorted(folders)}


def _steps_of(folder: pathlib.Path) -> list[inspect.StepInfo]:
    """Describes the steps of a directory, except those removed in the meantime."""
    infos = []
    for step in paths.list_steps(folder):
        with contextlib.suppress(FileNotFoundError):
            infos += inspect.inspect(paths.step_dir(folder, step), verify="size")
    return [info for info in infos if info.path.exists()]


def _best(place: str, folder: pathlib.Path) -> Best:
    try:
        score = (folder / "score").read_text()
    except FileNotFoundError:
        score = None
    return Best(
        place=place,
        metric=folder.name.partition("_")[2],
        score=score,
        step=max(paths.list_steps(folder), default=None),
    )


def _is_running(directory: pathlib.Path) -> bool:
    try:
        renewed_at = (directory / lease.NAME).stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - renewed_at < lease.STALE_SECONDS
