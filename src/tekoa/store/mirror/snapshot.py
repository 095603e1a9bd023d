"""A consistent picture of a working copy: its files, and what must be uploaded for them.

Steps are immutable, so a step whose manifest is already in the store is not read again; its other
files need not even be on disk. Files that grow, such as those of metrics, are uploaded in parts.

The writer of a run commits a step once its points are on disk. So steps are listed, and held by
links, before the other files are read; if a step was committed meanwhile, all is read again.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator

from tekoa.core import files as files_lib
from tekoa.store import errors
from tekoa.store.commit import durable, lease, manifest, paths
from tekoa.store.mirror import head as head_lib
from tekoa.store.mirror.head import Files, Part
from tekoa.store.read import hold

# Leases, and what is being written, removed or held: it belongs to this machine.
_LOCAL = re.compile(
    rf"{re.escape(lease.NAME)}|(.*\.tmp|\.trash|\.pin)-[0-9a-f]{{32}}|\..*\.[0-9a-f]{{32}}"
)
_N_TRIES = 10
_MAX_PARTS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The files of a working copy.

    Attributes:
        files: The parts of each file by its path, those to upload included.
        uploads: Bytes or a file by the name of the object to write.
        stamps: What identifies the contents of each file without reading it.
    """

    files: Files
    uploads: dict[str, pathlib.Path | bytes]
    stamps: dict[str, tuple[int, int, int]]


@contextlib.contextmanager
def snapshot(
    directory: pathlib.Path,
    stored: Files,
    stamps: dict[str, tuple[int, int, int]],
    *,
    prefix: str,
    own: pathlib.Path,
) -> Iterator[Snapshot]:
    """Creates a snapshot, whose steps are held during the `with` block.

    Args:
        directory: The working copy.
        stored: Files whose objects are in the store.
        stamps: The stamps of those of them that were read before.
        prefix: Folder of the objects to write; no other snapshot may use it.
        own: A directory on the same file system, for links.
    """
    for attempt in range(1, _N_TRIES + 1):
        with contextlib.ExitStack() as stack:
            taker = _Taker(directory, stored, stamps, prefix)
            steps = taker.list_steps()
            for step in steps:
                taker.take_step(step, own, stack)
            for path in taker.list_files():
                taker.take_file(path)
            # If steps are committed all the time, the picture is at least not older than they are.
            if steps == taker.list_steps() or attempt == _N_TRIES:
                yield Snapshot(files=taker.files, uploads=taker.uploads, stamps=taker.stamps)
                return


def stamps_of(directory: pathlib.Path, names: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Returns the stamps of those of the files that exist."""
    stamps = {}
    for path in names:
        with contextlib.suppress(FileNotFoundError):
            stamps[path] = _stamp((directory / path).stat())
    return stamps


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


class _Taker:
    def __init__(
        self,
        directory: pathlib.Path,
        stored: Files,
        stamps: dict[str, tuple[int, int, int]],
        prefix: str,
    ):
        self._directory, self._stored, self._old_stamps = directory, stored, stamps
        self._prefix = prefix
        self._folders: dict[str, Files] = {}
        for path, parts in stored.items():
            if step := head_lib.step_of(path):
                self._folders.setdefault(step, {})[path] = parts
        self.files: Files = {}
        self.uploads: dict[str, pathlib.Path | bytes] = {}
        self.stamps: dict[str, tuple[int, int, int]] = {}

    def list_steps(self) -> list[str]:
        return [path for path, is_step in _walk(self._directory) if is_step]

    def list_files(self) -> list[str]:
        return [path for path, is_step in _walk(self._directory) if not is_step]

    def take_step(self, step: str, own: pathlib.Path, stack: contextlib.ExitStack) -> None:
        folder = self._directory / step
        try:
            data = files_lib.read_bytes(folder / paths.MANIFEST, max_bytes=2**26)
            crc = zlib.crc32(data)
        except OSError:  # Written by another program, damaged, or gone.
            crc = None
        stored = self._folders.get(step, {})
        seal = stored.get(f"{step}/{paths.MANIFEST}")
        is_stored = crc is not None and seal is not None and [part.crc for part in seal] == [crc]
        if is_stored:
            self.files |= stored
        number = paths.parse_step(folder.name)
        # Retention may remove a step while it is uploaded.
        if not is_stored and number is not None:
            try:
                folder = stack.enter_context(hold.pinned(folder.parent, number, own))
            except errors.StepGoneError:
                return
        sums = {} if is_stored or number is None else _checksums(folder)
        with contextlib.suppress(FileNotFoundError):  # Gone: the list of steps has changed.
            for name, is_dir in durable.walk(folder):
                path, local = f"{step}/{name}", folder / name
                if is_dir or path in self.files or not _is_regular(local):
                    continue
                size, file_crc = sums.get(name) or durable.checksum(local)
                self._upload(path, (), local, size, file_crc)

    def take_file(self, path: str) -> None:
        parts = self._stored.get(path)
        try:
            with files_lib.open_regular(self._directory / path) as file:
                status = os.fstat(file.fileno())
                stamp = _stamp(status)
                if parts is not None and self._old_stamps.get(path) == stamp:
                    self.files[path], self.stamps[path] = parts, stamp
                    return
                data = file.read(status.st_size)  # It may grow meanwhile.
        except OSError:
            return  # Removed meanwhile.
        self.stamps[path] = stamp
        old, tail = _split(data, parts or ())
        if parts is not None and not tail and len(data) == sum(part.size for part in old):
            self.files[path] = old
        else:
            self._upload(path, old, tail, len(tail), zlib.crc32(tail))

    def _upload(
        self,
        path: str,
        before: tuple[Part, ...],
        source: pathlib.Path | bytes,
        size: int,
        crc: int,
    ) -> None:
        part = Part(f"{head_lib.FOLDER}/{self._prefix}/{path}", size, crc)
        self.files[path] = (*before, part)
        self.uploads[part.name] = source


def _split(data: bytes, parts: tuple[Part, ...]) -> tuple[tuple[Part, ...], bytes]:
    """Returns the parts of a file that are still its beginning, all or none, and the rest."""
    end = 0
    for part in parts:
        if zlib.crc32(data[end : end + part.size]) != part.crc:
            return (), data
        end += part.size
    if end > len(data) or (len(parts) >= _MAX_PARTS and end < len(data)):
        return (), data
    return parts, data[end:]


def _checksums(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Returns the sizes and checksums in the manifest of a step; empty if there is none."""
    try:
        return manifest.read(folder).files
    except (OSError, errors.StoreError):
        return {}


def _walk(directory: pathlib.Path, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yields the files below a directory, and its steps, with True, instead of their files."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = f"{prefix}{entry.name}"
        if _LOCAL.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            if head_lib.step_of(f"{path}/x") is not None:
                yield path, True
            else:
                yield from _walk(directory / entry.name, f"{path}/")
        elif entry.is_file(follow_symlinks=False):
            yield path, False


def _is_regular(path: pathlib.Path) -> bool:
    return path.is_file() and not path.is_symlink()
