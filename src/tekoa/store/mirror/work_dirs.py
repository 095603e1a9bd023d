"""Where the local copies of run directories are: in the user's cache directory.

The working copy of a writer is at `runs/DIGEST/NAME`; it stays after the program has ended. The
copies of readers are at `runs/readers/PID-ID/NAME`, one for each program, and removed at its end.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import pathlib
import re
import shutil
import uuid

_READER = re.compile(r"([0-9]+)-[0-9a-f]{32}")
_register_once = functools.cache(atexit.register)
_of_this_process: list[pathlib.Path] = []


def root() -> pathlib.Path:
    """Returns the directory of all copies; `XDG_CACHE_HOME` sets where it is."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home).resolve() / "tekoa" / "runs"


def of_writer(url: str) -> pathlib.Path:
    """Returns the working copy of a run directory; the same on every call.

    >>> of_writer('s3://bucket/runs/mnist').name
    'mnist'
    """
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return root() / digest / url.rpartition("/")[2]


def of_reader(url: str) -> pathlib.Path:
    """Returns a new directory, which is removed when the program ends."""
    _sweep()
    folder = root() / "readers" / f"{os.getpid()}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    _of_this_process.append(folder)
    _register_once(_remove_all, os.getpid())
    return folder / url.rpartition("/")[2]


def _remove_all(pid: int) -> None:
    for folder in _of_this_process if os.getpid() == pid else ():
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Removes the copies of readers that were killed."""
    with contextlib.suppress(FileNotFoundError):
        for path in (root() / "readers").iterdir():
            match = _READER.fullmatch(path.name)
            if match and not _is_alive(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
