"""Names of steps and leaves on disk.

Only `checkpoint_<step>` is a committed step. A step being written is named
`checkpoint_<step>.tmp-<uuid>`, a quarantined one `checkpoint_<step>.bad-<uuid>`, and one
being removed `.trash-<uuid>`. Valid steps that a run was rewound from are in `set_aside-<step>`.
"""

import errno
import functools
import itertools
import logging
import os
import pathlib
import re
import uuid
from collections.abc import Iterator
from typing import Literal

from tekoa.core import files

_log = logging.getLogger("tekoa.store")
Kind = Literal["tmp", "bad", "trash"]

# Files in a step: the list of its files, the index of its leaves, and T5X's msgpack file.
MANIFEST = "tekoa.manifest"
INDEX = "tekoa.json"
T5X = "checkpoint"
MAX_INDEX_BYTES = 2**28

_STEP = re.compile(r"checkpoint_(0|[1-9][0-9]*)")
_UNFINISHED = re.compile(r"checkpoint_[0-9]+\.(tmp|bad)-[0-9a-f]{32}|\.(trash)-[0-9a-f]{32}")


def step_dir(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Returns the directory of a committed step.

    Raises:
        ValueError: If the step is negative.

    >>> step_dir('run', 7).name
    'checkpoint_7'
    """
    if step < 0:
        raise ValueError(f"A step number cannot be negative, got {step}.")
    return files.local_path(directory) / f"checkpoint_{step}"


def parse_step(name: str) -> int | None:
    """Returns the step number in the name of a committed step, or None.

    >>> parse_step('checkpoint_7'), parse_step('checkpoint_7.tmp-12'), parse_step('checkpoint_07')
    (7, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def list_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Lists the steps in a directory by the names of its subdirectories, lowest first.

    The list is empty if the directory does not exist. Files and dangling links are ignored.
    """
    steps = []
    try:
        with os.scandir(files.local_path(directory)) as entries:
            for entry in entries:
                step = parse_step(entry.name)
                if step is not None and entry.is_dir():
                    steps.append(step)
                elif step is not None:
                    _warn_once(f"{entry.path}: ignored because it is not a directory.")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return []
    return sorted(steps)


@functools.cache
def _warn_once(line: str) -> None:
    _log.warning("%s", line)


def unfinished(directory: str | os.PathLike[str], kind: Kind) -> list[pathlib.Path]:
    """Lists this store's temporary, quarantined or half-deleted directories.

    Temporary directories of other programs are not listed, because they are not ours to remove.
    """
    matches = {path: _UNFINISHED.fullmatch(path.name) for path in pathlib.Path(directory).iterdir()}
    return sorted(path for path, match in matches.items() if match and kind in match.groups())


def new_dir(directory: str | os.PathLike[str], step: int, kind: Kind) -> pathlib.Path:
    """Returns a new unique path for a step that is written, quarantined or removed."""
    prefix = "" if kind == "trash" else f"checkpoint_{step}"
    return pathlib.Path(directory) / f"{prefix}.{kind}-{uuid.uuid4().hex}"


def aside_dirs(directory: str | os.PathLike[str], step: int) -> Iterator[pathlib.Path]:
    """Yields the possible directories for steps that are set aside, up to `step`.

    >>> [path.name for path in itertools.islice(aside_dirs('run', 7), 3)]
    ['set_aside-7', 'set_aside-7-2', 'set_aside-7-3']
    """
    first = files.local_path(directory) / f"set_aside-{step}"
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


def is_safe_path(path: str) -> bool:
    """Returns whether a path read from a file stays inside the directory it is joined to.

    >>> is_safe_path('a/b'), is_safe_path('/etc'), is_safe_path('a/../../b'), is_safe_path('')
    (True, False, False, False)
    """
    try:
        lengths = [len(os.fsencode(part)) for part in path.split("/")]
    except UnicodeEncodeError:
        return False
    is_inside = not {"", ".", ".."} & {*path.split("/")}
    return is_inside and "\0" not in path and max(lengths) <= 255


@functools.lru_cache(maxsize=1 << 16)
def escape(part: str) -> str:
    """Escapes one part of a leaf's name, so that names joined by '.' stay distinct.

    >>> escape('a.b/c'), escape('')
    ('a%2Eb%2Fc', '%')
    """
    if not part:
        return "%"
    return "".join(f"%{ord(c):02X}" if c in "%./\0" else c for c in part)
