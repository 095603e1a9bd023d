"""The newest step that can be used, and what was passed over on the way.

Damaged steps are passed over, with a line each. A directory that holds steps, usable
or put aside, is never taken for an empty one.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Generic, TypeVar

from tekoa.store import errors, names

_log = logging.getLogger("tekoa.store")
_N_RELISTS = 50
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skipped:
    """A step that could not be used, and why."""

    step: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found(Generic[T]):
    """What the newest usable step gave.

    Attributes:
        value: What `use` returned for it.
        step: The step.
        skipped: Newer steps that are damaged, newest first.
    """

    value: T
    step: int
    skipped: list[Skipped]


def newest_usable(
    directory: str | os.PathLike[str],
    use: Callable[[pathlib.Path], T],
    *,
    list_steps: Callable[[str | os.PathLike[str]], list[int]] = names.list_steps,
) -> Found[T] | None:
    """Applies `use` to the newest step, or to the newest one for which it works.

    Args:
        directory: A directory of steps.
        use: Reads a step; raises `errors.DamagedError` if the step is damaged.
        list_steps: Gives the steps of a directory, lowest first.

    Returns:
        None if the directory holds no step, not even one put aside.

    Raises:
        errors.NothingUsableError: If it holds steps, and none can be used.
    """
    for _ in range(_N_RELISTS):
        skipped: list[Skipped] = []
        for step in reversed(list_steps(directory)):
            path = names.step_dir(directory, step)
            try:
                return Found(value=use(path), step=step, skipped=skipped)
            except (errors.DamagedError, FileNotFoundError, NotADirectoryError) as error:
                if not path.exists():
                    break  # Its writer's retention removed it: a newer one has come.
                _log.warning("skipped step %d: %s", step, error)
                skipped.append(Skipped(step=step, reason=str(error)))
        else:
            return _nothing(directory, skipped)
    raise errors.StepGoneError(
        f"{directory}: every step was removed while it was read, {_N_RELISTS} times over. Keep "
        "more steps, or read them from a directory of links (`pins.pinned`)."
    )


def _nothing(directory: str | os.PathLike[str], skipped: list[Skipped]) -> None:
    is_dir = pathlib.Path(directory).is_dir()
    aside = names.unfinished(directory, "bad") if is_dir else []
    if not skipped and not aside:
        return
    lines = [f"  step {skip.step}: {skip.reason}" for skip in skipped]
    lines += [f"  {path.name}: put aside earlier as damaged" for path in aside]
    raise errors.NothingUsableError(
        f"{directory}: has checkpoints, but none can be used:\n" + "\n".join(lines) + "\n"
        "Nothing was changed. Bring one back from a copy, or choose an empty directory to "
        "start from scratch."
    )
