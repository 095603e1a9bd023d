"""What there is to show of a run, read from its directory and never written to it."""

import dataclasses
import os
import pathlib
import time
from typing import Any

from tekoa.estimator import page_events, run_files
from tekoa.estimator.page_events import Curves
from tekoa.store import inspecting, lease, names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The best checkpoints of a metric.

    Attributes:
        place: Their directory, relative to the run's.
        metric: The metric.
        score: Its best value as stored; None if there is none yet.
        step: The step that has it; None if there is none yet.
    """

    place: str
    metric: str
    score: str | None
    step: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run as its directory tells it.

    Attributes:
        directory: The model dir, absolute.
        record: What `run.json` holds.
        end_step: The step at which training ended; None if it has not.
        is_running: Whether a trainer has renewed its lease a moment ago.
        curves: Scalars by directory of TensorBoard files ("train", "eval" ...), then by tag.
        kept: Checkpoints by directory ("" for the run's own), by rising step.
        best: The best checkpoints, by metric.
    """

    directory: pathlib.Path
    record: dict[str, Any]
    end_step: int | None
    is_running: bool
    curves: dict[str, Curves]
    kept: dict[str, list[inspecting.StepInfo]]
    best: list[Best]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all."""
        return not (self.record or self.curves or self.kept)

    @property
    def step(self) -> int:
        """The last step that anything tells of."""
        points = [points[-1].step for tags in self.curves.values() for points in tags.values()]
        stored = [info.step for infos in self.kept.values() for info in infos]
        return max([0, *points, *stored])


def gather(directory: pathlib.Path) -> RunFacts:
    """Reads a model dir, which a trainer and evaluators may be writing."""
    folders = _folders(directory)
    curves = {_place(f, directory): page_events.read_curves(f) for f in folders}
    kept = {_place(f, directory): _steps_of(f) for f in folders}
    return RunFacts(
        directory=directory,
        record=run_files.read_facts(directory),
        end_step=run_files.last_step(directory),
        is_running=_is_running(directory),
        curves={place: found for place, found in curves.items() if found},
        kept={place: steps for place, steps in kept.items() if steps},
        best=[_best(f, directory) for f in folders if f.name.startswith(("high_", "low_"))],
    )


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    """All directories of a run, without the insides of checkpoints."""
    found = []
    for folder, below, _ in os.walk(directory):
        found.append(pathlib.Path(folder))
        below[:] = [name for name in below if not name.startswith(("checkpoint_", "."))]
    return sorted(found)


def _place(folder: pathlib.Path, directory: pathlib.Path) -> str:
    return "" if folder == directory else folder.relative_to(directory).as_posix()


def _steps_of(folder: pathlib.Path) -> list[inspecting.StepInfo]:
    """The steps with their checksums verified, without those that went away meanwhile."""
    found = []
    for step in names.list_steps(folder):
        path = names.step_dir(folder, step)
        try:
            found += inspecting.inspect(path, verify="full")
        except FileNotFoundError:
            continue
    return [info for info in found if info.path.exists()]


def _best(folder: pathlib.Path, directory: pathlib.Path) -> Best:
    try:
        score = (folder / "score").read_text()
    except FileNotFoundError:
        score = None
    return Best(
        place=_place(folder, directory),
        metric=folder.name.partition("_")[2],
        score=score,
        step=max(names.list_steps(folder), default=None),
    )


def _is_running(directory: pathlib.Path) -> bool:
    try:
        renewed = (directory / lease.NAME).stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - renewed < lease.STALE_SECONDS
