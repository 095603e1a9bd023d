"""Downloads files of a run directory from an object store into a local directory.

Of a step, only the manifest and the index are downloaded at first. The rest follows when the step
is needed. A damaged or missing object of a step is reported and its file left out: then the step
fails its verification, and whoever reads the newest step uses the one before.
"""

import concurrent.futures
import contextlib
import logging
import pathlib
import uuid
import zlib
from collections.abc import Iterable

from tekoa.store import errors
from tekoa.store.commit import durable, manifest, paths
from tekoa.store.mirror import head as head_lib
from tekoa.store.mirror.head import Head, Part
from tekoa.store.mirror.objects import Objects

_N_PARALLEL = 8
_FIRST = (paths.MANIFEST, paths.INDEX)

_log = logging.getLogger("tekoa.store")


def read_head(objects: Objects) -> tuple[Head, str] | None:
    """Returns the head of a directory and its version; None if there is none.

    Raises:
        errors.DamagedError: If it is damaged.
    """
    stored = objects.read(head_lib.NAME)
    if stored is None:
        return None
    data, version = stored
    return head_lib.parse(data, objects.at(head_lib.NAME)), version


def fetch_small(objects: Objects, head: Head, directory: pathlib.Path) -> list[str]:
    """Downloads all files that belong to no step, and the manifest and index of every step.

    Files that are there already are not downloaded again.

    Returns:
        What is wrong with objects of steps, one line each.

    Raises:
        errors.DamagedError: If an object of a file that belongs to no step is damaged.
    """
    return _fetch(objects, head, directory, filter(_is_small, head.files))


def fetch_missing(objects: Objects, head: Head, directory: pathlib.Path) -> list[str]:
    """As `fetch_small`, but leaves files that differ from those in the store."""
    names = [path for path in head.files if _is_small(path) and not (directory / path).exists()]
    return _fetch(objects, head, directory, names)


def fetch_step(objects: Objects, head: Head, directory: pathlib.Path, step: str) -> list[str]:
    """Downloads the remaining files of a step.

    Args:
        objects: The store.
        head: Lists the files.
        directory: The local directory of the run.
        step: Path of the step in the run.

    Returns:
        What is wrong with the step, one line each; empty if it is complete and valid.
    """
    names = [path for path in head.files if head_lib.step_of(path) == step]
    problems = _fetch(objects, head, directory, names)
    try:
        manifest.check(directory / step, manifest.read(directory / step), "full")
    except FileNotFoundError:
        pass  # Written by another program: nothing to compare with.
    except errors.StoreError as error:
        return problems or [str(error)]
    return problems


def fetch_newest(
    objects: Objects, head: Head, directory: pathlib.Path, folder: str = ""
) -> list[str]:
    """Downloads the newest valid step of a folder; returns what is wrong with newer ones."""
    all_problems: list[str] = []
    for step in reversed(paths.list_steps(directory / folder)):
        name = paths.step_dir(folder or ".", step).as_posix()
        problems = fetch_step(objects, head, directory, name)
        all_problems += problems
        if not problems:
            break
    return all_problems


def report(problems: Iterable[str]) -> None:
    """Logs what is wrong with steps."""
    for problem in problems:
        _log.warning("%s", problem)


def _is_small(path: str) -> bool:
    step = head_lib.step_of(path)
    return step is None or path.removeprefix(f"{step}/") in _FIRST


def _fetch(
    objects: Objects, head: Head, directory: pathlib.Path, names: Iterable[str]
) -> list[str]:
    def one(path: str) -> str:
        problem = _fetch_file(objects, head.files[path], directory / path)
        if not problem:
            return ""
        line = f"{objects.url}: {path} is damaged: {problem}."
        if head_lib.step_of(path) is None:
            raise errors.DamagedError(f"{line} Restore the object from a backup.")
        return line

    with concurrent.futures.ThreadPoolExecutor(_N_PARALLEL, "tekoa-fetch") as pool:
        return [line for line in pool.map(one, names) if line]


def _fetch_file(objects: Objects, parts: tuple[Part, ...], target: pathlib.Path) -> str:
    """Downloads a file unless it is there; returns what is wrong with its objects."""
    size = sum(part.size for part in parts)
    if target.is_file() and target.stat().st_size == size and _matches(target, parts):
        return ""
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = target.with_name(f".{uuid.uuid4().hex[:8]}.{uuid.uuid4().hex}")
    try:
        if len(parts) == 1:
            if not objects.download_to(parts[0].name, copy):
                return f"the object {objects.at(parts[0].name)} is missing"
        else:
            data = [objects.download(part.name) for part in parts]
            if None in data:
                return f"the object {objects.at(parts[data.index(None)].name)} is missing"
            copy.write_bytes(b"".join(piece for piece in data if piece is not None))
        if copy.stat().st_size != size or not _matches(copy, parts):
            return f"the checksum of {objects.at(parts[-1].name)} does not match"
        copy.replace(target)
        return ""
    finally:
        with contextlib.suppress(FileNotFoundError):
            copy.unlink()


def _matches(path: pathlib.Path, parts: tuple[Part, ...]) -> bool:
    if len(parts) == 1:
        return durable.checksum(path) == (parts[0].size, parts[0].crc)
    with path.open("rb") as file:
        return all(zlib.crc32(file.read(part.size)) == part.crc for part in parts)
