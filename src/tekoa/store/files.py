"""Files that are on the disk when we say so: fsync, atomic replacement, checksums."""

import concurrent.futures
import contextlib
import os
import pathlib
import uuid
import zlib
from collections.abc import Iterable, Iterator

_BLOCK = 1 << 20
_N_THREADS = 4
# Below this, threads cost more than they bring.
_MANY_BYTES = 1 << 25


def fsync(path: str | os.PathLike[str]) -> None:
    """Forces a file's bytes, or a directory's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: str | os.PathLike[str], *, sync: bool = False) -> tuple[int, int]:
    """Reads a file once and gives its size and CRC-32.

    zlib's CRC-32 runs at 4 GB/s here, twice as fast as SHA-256, and finds every
    single flipped bit. It guards against damage, not against an attacker.

    Args:
        path: The file.
        sync: Force the file to the disk too, while it is open.

    Returns:
        The size in bytes and the CRC-32.
    """
    size, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while n_read := file.readinto(buffer):
            crc = zlib.crc32(buffer[:n_read], crc)
            size += n_read
        if sync:
            os.fsync(file.fileno())
    return size, crc


def checksums(
    directory: pathlib.Path, paths: Iterable[str], *, sync: bool = False
) -> dict[str, tuple[int, int]]:
    """Gives size and CRC-32 of several files, large ones side by side.

    Args:
        directory: Where the paths start.
        paths: Files relative to it.
        sync: As for `checksum`.
    """
    paths = list(paths)

    def one(path: str) -> tuple[int, int]:
        return checksum(directory / path, sync=sync)

    if sum((directory / path).stat().st_size for path in paths) < _MANY_BYTES:
        return {path: one(path) for path in paths}
    with concurrent.futures.ThreadPoolExecutor(_N_THREADS) as pool:
        return dict(zip(paths, pool.map(one, paths), strict=True))


def write_new(path: str | os.PathLike[str], data: bytes) -> None:
    """Creates a file with its bytes on the disk; fails if it exists."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: str | os.PathLike[str], data: bytes) -> None:
    """Puts `data` in place of a file: readers see the old or the new bytes, never a mix."""
    path = pathlib.Path(path)
    tmp = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_new(tmp, data)
        os.replace(tmp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)
        raise
    fsync(path.parent)


def walk(directory: str | os.PathLike[str]) -> Iterator[tuple[str, bool]]:
    """Yields every path below `directory`, relative, with whether it is a directory.

    A directory comes after what it holds. Symbolic links count as files.
    """
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            for path, is_dir in walk(entry.path):
                yield f"{entry.name}/{path}", is_dir
            yield entry.name, True
        else:
            yield entry.name, False
