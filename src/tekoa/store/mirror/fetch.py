"""Downloads files of a run directory from an object store into a local directory.

Of a step, only the manifest and the index are downloaded at first. The rest follows when the step
is needed. A damaged or missing object of a step is reported and its file left out: then the step
fails its verification, and whoever reads the newest step uses the one before. A damaged file that
belongs to no step is reported and downloaded as it is: its readers treat it as on a local disk.
"""

import concurrent.futures
import contextlib
import logging
import pathlib
import uuid
import zlib
from collections.abc import Iterable, Sequence

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


def small_files(head: Head) -> list[str]:
    """Lists all files that belong to no step, and the manifest and index of every step."""
    return list(filter(_is_small, head.files))


def fetch_files(
    objects: Objects, head: Head, directory: pathlib.Path, names: Sequence[str]
) -> dict[str, str]:
    """Downloads files, unless they are there already.

    Returns:
        What is wrong with their objects, one line for each damaged file.
    """

    def one(path: str) -> str:
        is_own = head_lib.step_of(path) is None
        problem = _fetch_file(objects, head.files[path], directory / path, keep_damaged=is_own)
        line = f"{objects.url}: {path} is damaged: {problem}."
        if problem and is_own:
            line += (
                " What is left of it is used. To repair it, restore the object from a backup; to "
                "continue without the file, delete the object."
            )
        return line if problem else ""

    with concurrent.futures.ThreadPoolExecutor(_N_PARALLEL, "tekoa-fetch") as pool:
        lines = zip(names, pool.map(one, names), strict=True)
        return {path: line for path, line in lines if line}


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
    problems = list(fetch_files(objects, head, directory, names).values())
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
    """Logs what is wrong with files."""
    for problem in problems:
        _log.warning("%s", problem)


def _is_small(path: str) -> bool:
    step = head_lib.step_of(path)
    return step is None or path.removeprefix(f"{step}/") in _FIRST


def _fetch_file(
    objects: Objects, parts: tuple[Part, ...], target: pathlib.Path, *, keep_damaged: bool
) -> str:
    """Downloads a file unless it is there; returns what is wrong with its objects.

    Args:
        objects: The store.
        parts: The parts of the file.
        target: Where it is written.
        keep_damaged: Whether a damaged file is written too, as far as it is there.
    """
    if target.is_file() and not _mismatch(target, parts):
        return ""
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = target.with_name(f".{uuid.uuid4().hex[:8]}.{uuid.uuid4().hex}")
    try:
        lost = _download(objects, parts, copy)
        problem = f"the object {objects.at(lost)} is missing" if lost else ""
        if not problem and (name := _mismatch(copy, parts)):
            problem = f"the checksum of {objects.at(name)} does not match"
        if copy.exists() and (keep_damaged or not problem):
            copy.replace(target)
        return problem
    finally:
        with contextlib.suppress(FileNotFoundError):
            copy.unlink()


def _download(objects: Objects, parts: tuple[Part, ...], path: pathlib.Path) -> str:
    """Writes the parts that exist to a file; returns the name of the first missing one."""
    if len(parts) == 1:
        return "" if objects.download_to(parts[0].name, path) else parts[0].name
    pieces = {part.name: objects.download(part.name) for part in parts}
    path.write_bytes(b"".join(piece for piece in pieces.values() if piece is not None))
    return next((name for name, piece in pieces.items() if piece is None), "")


def _mismatch(path: pathlib.Path, parts: tuple[Part, ...]) -> str:
    """Returns the name of the first part from which a file differs; empty if it is the same."""
    if len(parts) == 1:
        (part,) = parts
        return "" if durable.checksum(path) == (part.size, part.crc) else part.name
    with path.open("rb") as file:
        for part in parts:
            if zlib.crc32(file.read(part.size)) != part.crc:
                return part.name
        return parts[-1].name if parts and file.read(1) else ""
