"""Paths and files from outside: local paths, regular files, bounded sizes. Imports no JAX.

A directory may contain anything: a pipe that blocks whoever opens it, a device, a link to a
file elsewhere, a file larger than memory. Every file that Tekoa reads is opened here.
"""

import errno
import io
import json
import os
import pathlib
import re
import stat
from typing import Any

# Two letters or more, so that a drive letter is none. `pathlib` shortens '//' to '/'.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class PathError(ValueError):
    """A path that cannot be used: a URL, or one that contains a null character."""

    exit_code = 2


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Converts a path from a user to a `pathlib.Path`, with `~` expanded.

    Raises:
        PathError: If it is a URL, because only local files are supported, or contains characters
            that no path can contain.

    >>> local_path('runs/mnist')
    PosixPath('runs/mnist')
    >>> local_path('gs://bucket/run')
    Traceback (most recent call last):
    ...
    tekoa.core.files.PathError: 'gs://bucket/run' is a URL, but only local paths are supported ...
    """
    text = os.fspath(path)
    if url := _URL.match(text):
        raise PathError(
            f"{text!r} is a URL, but only local paths are supported here. Use a local directory; "
            "for a run in an object store, `with tekoa.store.mirrored(url) as directory`. (For a "
            f"local directory named {url[1] + ':'!r}, write './{url[1]}:/...'.)"
        )
    if "\0" in text:
        raise PathError(f"{text!r} contains a null character, so it cannot be a path.")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise PathError(f"{text!r} contains half of a character, so it cannot be a path.") from None
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError:  # There is no such user: '~' is part of the name.
        return pathlib.Path(text)


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = False) -> io.BufferedReader:
    """Opens a regular file for reading, without blocking on anything else.

    Args:
        path: The file.
        follow_links: Whether the path may be a link to a regular file.

    Raises:
        OSError: If it is not a regular file, or cannot be opened.
    """
    # Opening a device can have effects, so it is checked before.
    _check_regular(path, os.stat(path, follow_symlinks=follow_links))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW))
    try:
        _check_regular(path, os.fstat(fd))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def size(path: str | os.PathLike[str]) -> int:
    """Returns the size of a regular file in bytes; links are not followed.

    Raises:
        OSError: If it is not a regular file.
    """
    status = os.lstat(path)
    _check_regular(path, status)
    return status.st_size


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Reads a complete regular file; links are not followed.

    Args:
        path: The file.
        max_bytes: The largest size; nothing is read from a larger file.

    Raises:
        OSError: If it is not a regular file, too large, or cannot be read.
    """
    with open_regular(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes > max_bytes:
            reason = f"has {n_bytes} bytes, at most {max_bytes} are expected"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
        return file.read(max_bytes)


def read_json(path: str | os.PathLike[str], *, max_bytes: int) -> dict[str, Any]:
    """Reads a JSON object from a regular file.

    Raises:
        OSError: See `read_bytes`.
        ValueError: If the file is not a JSON object.
    """
    try:
        value = json.loads(read_bytes(path, max_bytes=max_bytes))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {str(value)[:40]!r}")
    return value
