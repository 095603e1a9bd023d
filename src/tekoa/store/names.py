"""How steps and leaves are named on disk.

`checkpoint_<step>` is a committed step and nothing else is. While it is written it is
`checkpoint_<step>.tmp-<uuid>`, once found bad `checkpoint_<step>.bad-<uuid>`, and
while it is removed `.trash-<uuid>`.
"""

import functools
import os
import pathlib
import re
import uuid
from typing import Literal

Kind = Literal["tmp", "bad", "trash"]

# Files of a step: what it consists of, what it holds, and T5X's msgpack file.
MANIFEST = "tekoa.manifest"
INDEX = "tekoa.json"
T5X = "checkpoint"

_STEP = re.compile(r"checkpoint_(0|[1-9]\d*)")
_ODD = re.compile(
    r"checkpoint_(?P<step>\d+)\.(?P<kind>tmp|bad)-[0-9a-f]{32}|\.(?P<trash>trash)-[0-9a-f]{32}"
)


def step_dir(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Gives the directory of a committed step.

    Raises:
        ValueError: If the step is negative.

    >>> step_dir('run', 7).name
    'checkpoint_7'
    """
    if step < 0:
        raise ValueError(f"A step counts completed steps and cannot be negative, got {step}.")
    return pathlib.Path(directory) / f"checkpoint_{step}"


def parse_step(name: str) -> int | None:
    """Reads the step off the name of a committed step, else None.

    >>> parse_step('checkpoint_7'), parse_step('checkpoint_7.tmp-12'), parse_step('checkpoint_07')
    (7, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def list_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Lists the committed steps, lowest first; empty if there is no such directory."""
    try:
        with os.scandir(directory) as entries:
            steps = [parse_step(entry.name) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(step for step in steps if step is not None)


def unfinished(directory: str | os.PathLike[str], kind: Kind) -> list[pathlib.Path]:
    """Lists this store's temporary, quarantined or half-deleted directories.

    Temporary directories of other programs are not listed: they are not ours to remove.
    """
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _ODD.fullmatch(entry.name)
            if match and kind in (match["kind"], match["trash"]):
                found.append(pathlib.Path(entry.path))
    return sorted(found)


def tmp_dir(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Gives a new unique name for a step that is being written."""
    return pathlib.Path(directory) / f"checkpoint_{step}.tmp-{uuid.uuid4().hex}"


def bad_dir(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Gives a new unique name for a step that is put aside."""
    return pathlib.Path(directory) / f"checkpoint_{step}.bad-{uuid.uuid4().hex}"


def trash_dir(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Gives a new unique name for a step that is about to be removed."""
    return pathlib.Path(directory) / f".trash-{uuid.uuid4().hex}"


def is_safe_path(path: str) -> bool:
    """Tells whether a path read from a file stays inside the directory it is joined to.

    >>> is_safe_path('a/b'), is_safe_path('/etc'), is_safe_path('a/../../b'), is_safe_path('')
    (True, False, False, False)
    """
    parts = path.split("/")
    return (
        bool(path)
        and "\0" not in path
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    )


@functools.lru_cache(maxsize=1 << 16)
def escape(part: str) -> str:
    """Writes one part of a leaf's name so that no two names are the same joined by '.'.

    >>> escape('a.b/c'), escape('')
    ('a%2Eb%2Fc', '%')
    """
    if not part:
        return "%"
    return "".join(f"%{ord(c):02X}" if c in "%./\0" else c for c in part)
