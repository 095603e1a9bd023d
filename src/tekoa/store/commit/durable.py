"""Durable files: fsync, atomic replacement, checksums, removal."""

import contextlib
import ctypes
import errno
import os
import pathlib
import stat
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator

from tekoa.core import files

_BLOCK = 1 << 20
_N_THREADS = 4
# Below this, threads cost more than they gain.
_MANY_BYTES = 1 << 25
# Arguments of renameat2(2).
_CURRENT_DIRECTORY, _EXCHANGE = -100, 2


def fsync(path: str | os.PathLike[str]) -> None:
    """Forces a file's bytes, or a directory's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: str | os.PathLike[str], *, sync: bool = False) -> tuple[int, int]:
    """Reads a file once and returns its size in bytes and its CRC-32.

    zlib's CRC-32 runs at 4 GB/s, twice as fast as SHA-256, and detects every single
    flipped bit. It guards against damage, not against an attacker.

    Args:
        path: The file; links are not followed.
        sync: Also force the file to disk, while it is open.

    Raises:
        OSError: If it is not a regular file.
    """
    size, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK))
    with files.open_regular(path) as file:
        while n_read := file.readinto(buffer):
            crc = zlib.crc32(buffer[:n_read], crc)
            size += n_read
        if sync:
            os.fsync(file.fileno())
    return size, crc


def checksums(
    directory: pathlib.Path, paths: Iterable[str], *, sync: bool = False
) -> dict[str, tuple[int, int]]:
    """Returns the size and CRC-32 of several files, in threads if they are large.

    Args:
        directory: The directory that the paths are relative to.
        paths: The files.
        sync: As for `checksum`.
    """
    paths = list(paths)
    pending, results, failures = paths[::-1], {}, []

    def work() -> None:
        with contextlib.suppress(IndexError):  # Nothing is pending any more.
            while not failures:
                path = pending.pop()
                try:
                    results[path] = checksum(directory / path, sync=sync)
                except BaseException as error:
                    failures.append(error)

    helpers: list[threading.Thread] = []
    if sum((directory / path).stat().st_size for path in paths) >= _MANY_BYTES:
        # At the end of the program Python starts no threads; this one then does all the work.
        with contextlib.suppress(RuntimeError):
            for _ in range(_N_THREADS - 1):
                helper = threading.Thread(target=work, name="tekoa-checksum", daemon=True)
                helper.start()
                helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
    return {path: results[path] for path in paths}


def write_new(path: str | os.PathLike[str], data: bytes, *, sync: bool = True) -> None:
    """Creates a file and, with `sync`, forces it to disk; fails if it exists."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def replace(path: str | os.PathLike[str], data: bytes, *, sync: bool = True) -> None:
    """Replaces a file atomically: readers see the old or the new bytes, never a mix.

    Args:
        path: The file; it need not exist.
        data: Its new contents.
        sync: Also force the file to disk. If not, it may be damaged after a power cut.
    """
    path = pathlib.Path(path)
    tmp = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_new(tmp, data, sync=sync)
        os.replace(tmp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)
        raise
    if sync:
        fsync(path.parent)


def exchange(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> None:
    """Swaps two paths, so that neither name is missing at any moment.

    Raises:
        OSError: With the number ENOSYS or EINVAL if the system cannot do this.
    """
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if swap(_CURRENT_DIRECTORY, os.fsencode(a), _CURRENT_DIRECTORY, os.fsencode(b), _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(a), None, os.fspath(b))


def remove(path: pathlib.Path, *, on_file: Callable[[], None] = lambda: None) -> None:
    """Removes a file, a link or a directory tree; never what a link points to.

    Every removal goes through the handle of the containing directory, so that replacing a
    directory by a link in the meantime cannot redirect it. Entries that are already gone or
    cannot be removed are skipped.

    Args:
        path: What to remove. Its parent may be reached through links.
        on_file: Called after each file of a directory.
    """
    with contextlib.suppress(OSError):
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not stat.S_ISDIR(os.lstat(path.name, dir_fd=parent).st_mode):
                os.unlink(path.name, dir_fd=parent)
                return
            for _, folders, names, fd in os.fwalk(path.name, topdown=False, dir_fd=parent):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
                    on_file()
                for name in folders:
                    try:
                        os.rmdir(name, dir_fd=fd)
                    except NotADirectoryError:  # A link to a directory.
                        os.unlink(name, dir_fd=fd)
            os.rmdir(path.name, dir_fd=parent)
        finally:
            os.close(parent)


def walk(directory: str | os.PathLike[str]) -> Iterator[tuple[str, bool]]:
    """Yields every relative path below `directory`, and whether it is a directory.

    A directory comes after its contents. Symbolic links count as files.
    """
    with os.scandir(directory) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            for path, is_dir in walk(entry.path):
                yield f"{entry.name}/{path}", is_dir
            yield entry.name, True
        else:
            yield entry.name, False
