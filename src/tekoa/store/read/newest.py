"""The newest valid step of a directory.

Damaged steps are skipped, with a log line for each. A directory that contains steps, even only
quarantined ones, is never treated as an empty one.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Generic, TypeVar

from tekoa.store import errors
from tekoa.store.commit import paths

_log = logging.getLogger("tekoa.store")
_N_RELISTS = 50
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A step that could not be used, and why."""

    step: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidStep(Generic[T]):
    """The newest valid step.

    Attributes:
        value: The result of `use` for this step.
        step: The step number.
        skipped: Newer steps that are damaged, newest first.
    """

    value: T
    step: int
    skipped: list[SkippedStep]


def newest_valid(
    directory: str | os.PathLike[str],
    use: Callable[[pathlib.Path], T],
    *,
    list_steps: Callable[[str | os.PathLike[str]], list[int]] = paths.list_steps,
) -> ValidStep[T] | None:
    """Applies `use` to the newest step for which it succeeds.

    Args:
        directory: A directory of steps.
        use: Reads a step; raises `errors.DamagedError` if the step is damaged.
        list_steps: Returns the steps of a directory, lowest first.

    Returns:
        None if the directory contains no step, not even a quarantined one.

    Raises:
        errors.NothingUsableError: If it contains steps, but none is usable.
    """
    for _ in range(_N_RELISTS):
        skipped: list[SkippedStep] = []
        for step in reversed(list_steps(directory)):
            path = paths.step_dir(directory, step)
            try:
                return ValidStep(value=use(path), step=step, skipped=skipped)
            except (errors.DamagedError, FileNotFoundError, NotADirectoryError) as error:
                if not path.exists():
                    break  # Removed by its writer's retention, so there is a newer one.
                _log.warning("skipped step %d: %s", step, error)
                skipped.append(SkippedStep(step=step, reason=str(error)))
        else:
            _raise_if_any_exist(directory, skipped)
            return None
    raise errors.StepGoneError(
        f"{directory}: every step was removed while it was being read, {_N_RELISTS} times. Keep "
        "more steps, or hold them with `tekoa.store.pinned` while reading."
    )


def _raise_if_any_exist(directory: str | os.PathLike[str], skipped: list[SkippedStep]) -> None:
    is_dir = pathlib.Path(directory).is_dir()
    quarantined = paths.unfinished(directory, "bad") if is_dir else []
    if not skipped and not quarantined:
        return
    lines = [f"  step {skip.step}: {skip.reason}" for skip in skipped]
    lines += [f"  {path.name}: quarantined earlier as damaged" for path in quarantined]
    raise errors.NothingUsableError(
        f"{directory}: contains checkpoints, but none is usable:\n" + "\n".join(lines) + "\n"
        "Nothing was changed. Restore one from a backup, or choose an empty directory to "
        "start from scratch."
    )
