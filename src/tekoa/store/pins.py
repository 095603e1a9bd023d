"""A reader's hold on a step that its writer may remove at any moment.

The reader links the step's files into a directory of its own; the writer's retention
then removes its names, not the bytes. Nothing is ever changed in the writer's
directory, which may be read-only.
"""

import contextlib
import errno
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

from tekoa.store import errors, files, names

_PREFIX = ".pin-"
# No links between file systems, on this file system, or to files of another user.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.EROFS)


@contextlib.contextmanager
def pinned(
    directory: str | os.PathLike[str], step: int, own: str | os.PathLike[str]
) -> Iterator[pathlib.Path]:
    """Holds a step for the body of a `with` statement.

    Args:
        directory: The writer's directory of steps.
        step: The step to hold.
        own: The reader's own directory, for the links; made if needed.

    Yields:
        The path to read the step from. Where links cannot be made it is the step
        itself, which may then vanish while it is read.

    Raises:
        errors.StepGoneError: If the step is not there, or vanishes while it is linked.
    """
    source = names.step_dir(directory, step)
    pin = pathlib.Path(own) / f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        yield _link(source, pin / source.name)
    finally:
        shutil.rmtree(pin, ignore_errors=True)


def sweep(own: str | os.PathLike[str]) -> None:
    """Removes the pins that a killed reader left in its own directory."""
    for path in pathlib.Path(own).glob(f"{_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _link(source: pathlib.Path, pin: pathlib.Path) -> pathlib.Path:
    try:
        pin.mkdir(parents=True)
        for path, is_dir in files.walk(source):
            if is_dir:
                (pin / path).mkdir(parents=True, exist_ok=True)
            else:
                (pin / path).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / path, pin / path, follow_symlinks=False)
    except FileNotFoundError:
        raise errors.StepGoneError(
            f"{source}: was removed before it could be held. Take the next step."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return source
    return pin
