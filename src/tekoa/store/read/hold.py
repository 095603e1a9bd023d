"""Holds a step that its writer may remove at any moment.

The reader links the step's files into its own directory. The writer's retention then removes
its own names, but not the bytes. Nothing is ever changed in the writer's directory, which may
be read-only.
"""

import contextlib
import errno
import os
import pathlib
import re
import uuid
from collections.abc import Iterator

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable, paths

_PREFIX = ".pin-"
_PIN = re.compile(r"\.pin-[0-9a-f]{32}")
# No links between file systems, on this file system, or to files of another user.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.EROFS)


@contextlib.contextmanager
def pinned(
    directory: str | os.PathLike[str], step: int, own: str | os.PathLike[str]
) -> Iterator[pathlib.Path]:
    """Holds a step during a `with` block.

    Args:
        directory: The writer's directory of steps.
        step: The step to hold.
        own: The reader's own directory, for the links; created if needed.

    Yields:
        The path to read the step from. If links are not possible it is the step itself,
        which may then disappear while it is being read.

    Raises:
        errors.StepGoneError: If the step does not exist, or disappears while it is linked.
    """
    source = paths.step_dir(directory, step)
    pin = files.local_path(own) / f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        yield _link(source, pin / source.name)
    finally:
        durable.remove(pin)


def sweep(own: str | os.PathLike[str]) -> None:
    """Removes the links that a killed reader left in its own directory."""
    for path in pathlib.Path(own).glob(f"{_PREFIX}*"):
        if _PIN.fullmatch(path.name):
            durable.remove(path)


def _link(source: pathlib.Path, pin: pathlib.Path) -> pathlib.Path:
    try:
        pin.mkdir(parents=True)
        for path, is_dir in durable.walk(source):
            (pin / path if is_dir else (pin / path).parent).mkdir(parents=True, exist_ok=True)
            if not is_dir:
                os.link(source / path, pin / path, follow_symlinks=False)
    except FileNotFoundError:
        raise errors.StepGoneError(
            f"{source}: was removed before it could be held. Use the next step."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return source
    return pin
