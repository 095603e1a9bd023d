"""The facts about a run that the page shows, read from its directory."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tekoa.estimator.report import events
from tekoa.estimator.report.events import Curves
from tekoa.estimator.run import run_files
from tekoa.store import errors
from tekoa.store.commit import lease, manifest, paths, score
from tekoa.store.read import inspect, json_lines

T = TypeVar("T")
TRAIN = "train"  # The folder with the curves of training.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The best checkpoints of a metric.

    Attributes:
        place: Their directory, relative to the model directory.
        metric: Name of the metric.
        score: The best value; None if there is none yet.
        step: The step with that value; None if there is none yet.
    """

    place: str
    metric: str
    score: float | None
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
        check: What `tekoa scales MODEL --check` found out about the size of steps; "" if not run.
        texts: Texts that stages added to checkpoints, such as samples, by step and name.
        problems: A line about each damaged file, except checkpoints.
    """

    directory: pathlib.Path
    record: dict[str, Any]
    end_step: int | None
    is_running: bool
    curves: dict[str, Curves]
    checkpoints: dict[str, list[inspect.StepInfo]]
    best: list[Best]
    check: str = ""
    texts: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

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


def gather(directory: pathlib.Path, *, verify: manifest.Verify | None = "size") -> RunFacts:
    """Reads a model directory; a trainer and evaluators may be writing to it.

    Args:
        directory: The model directory.
        verify: How thoroughly to check the files of checkpoints. None reads neither checkpoints
            nor the scales of parameters.
    """
    folders = _folders(directory)
    problems: list[str] = []
    without = "params/" if verify is None else ""
    curves = {p: events.read_curves(f, problems, without=without) for p, f in folders.items()}
    checkpoints = {} if verify is None else {p: _steps_of(f, verify) for p, f in folders.items()}
    return RunFacts(
        directory=directory,
        record=_if_valid(lambda: run_files.read_facts(directory), problems) or {},
        end_step=_if_valid(lambda: run_files.last_step(directory), problems),
        is_running=_is_running(directory),
        curves={place: by_tag for place, by_tag in curves.items() if by_tag},
        checkpoints={place: steps for place, steps in checkpoints.items() if steps},
        best=_best_of(folders, problems),
        check=_if_valid(lambda: _text_of(directory / run_files.CHECK_FILE), problems) or "",
        texts=_if_valid(lambda: json_lines.read_texts(directory), problems) or {},
        problems=problems,
    )


def _text_of(path: pathlib.Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def is_run(directory: pathlib.Path) -> bool:
    """Whether a directory looks like that of a run, without reading its files."""
    has_events = any(directory.glob(f"{TRAIN}/{events.PREFIX}*"))
    return (
        has_events or (directory / run_files.RUN_FILE).exists() or bool(paths.list_steps(directory))
    )


def _if_valid(read: Callable[[], T], problems: list[str]) -> T | None:
    """Returns what a function reads; if that is impossible, adds a line and returns None."""
    try:
        return read()
    except (errors.DamagedError, PermissionError) as error:
        problems.append(str(error))
        return None


def _folders(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns all directories of a run except checkpoints, by relative path ("" for itself)."""
    folders = [directory]
    for folder, subfolders, _ in os.walk(directory):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(("checkpoint_", ".")) and not os.path.islink(f"{folder}/{name}")
        ]
        folders += [pathlib.Path(folder, n) for n in subfolders]
    return {"/".join(f.relative_to(directory).parts): f for f in sorted(folders)}


def _steps_of(folder: pathlib.Path, verify: manifest.Verify) -> list[inspect.StepInfo]:
    """Describes the steps of a directory, except those removed in the meantime."""
    infos = []
    for step in paths.list_steps(folder):
        with contextlib.suppress(FileNotFoundError):
            infos += inspect.inspect(paths.step_dir(folder, step), verify=verify)
    return [info for info in infos if info.path.exists()]


def _best_of(folders: dict[str, pathlib.Path], problems: list[str]) -> list[Best]:
    return [
        Best(
            place=place,
            metric=folder.name.partition("_")[2],
            score=_if_valid(functools.partial(score.read, folder / score.NAME), problems),
            step=max(paths.list_steps(folder), default=None),
        )
        for place, folder in folders.items()
        if folder.name.startswith(tuple(score.PREFIXES.values()))
    ]


def _is_running(directory: pathlib.Path) -> bool:
    try:
        renewed_at = (directory / lease.NAME).lstat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - renewed_at < lease.STALE_SECONDS
