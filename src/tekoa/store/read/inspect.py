"""The contents of a directory of checkpoints, listed without JAX."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from tekoa.store import errors
from tekoa.store.commit import durable, manifest, paths
from tekoa.store.formats import checked
from tekoa.store.mirror import mirror


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Facts about a step that are known without reading its arrays.

    Attributes:
        step: The step number.
        path: Its directory.
        format: 'native', 't5x' or 'unknown'.
        n_bytes: Total size of its files.
        problem: Why it is unusable; empty if no problem was found.
        meta: The JSON values stored with it.
        metrics: The numbers that retention compares.
    """

    step: int
    path: pathlib.Path
    format: str
    n_bytes: int
    problem: str
    meta: dict[str, Any]
    metrics: dict[str, float]


def inspect(
    directory: str | os.PathLike[str], *, verify: manifest.Verify = "size"
) -> list[StepInfo]:
    """Describes every step of a directory, lowest first.

    Args:
        directory: A directory of steps, or one step; it may be a URL in an object store.
        verify: How thoroughly to check the files.
    """
    path = mirror.fetched(directory, steps="none" if verify == "none" else "all").absolute()
    step = paths.parse_step(path.name)
    if step is not None and path.is_dir():
        return [_inspect_step(path.resolve(), step, verify)]
    return [
        _inspect_step(paths.step_dir(path, step), step, verify) for step in paths.list_steps(path)
    ]


def _inspect_step(path: pathlib.Path, step: int, verify: manifest.Verify) -> StepInfo:
    format, problem, index, n_bytes = "unknown", "", {}, 0
    try:
        # What is not a step may be the top of a large tree, so nothing in it is listed before.
        sealed = checked.read_manifest(path)
        format = "t5x" if sealed is None else sealed.format
        # Of a copy from an object store, not all files need be there.
        listed = sealed.files.values() if sealed is not None and verify == "none" else None
        n_bytes = sum(_sizes(path) if listed is None else (n for n, _ in listed))
        checked.check_files(path, sealed, verify=verify)
        if sealed is None:
            _check_t5x(path)
        if (path / paths.INDEX).exists():  # T5X's own steps have none.
            index = checked.read_index(path)
    except errors.StoreError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    return StepInfo(
        step=step,
        path=path,
        format=format,
        n_bytes=n_bytes,
        problem=problem,
        meta=index.get("meta", {}),
        metrics=index.get("metrics", {}),
    )


def _check_t5x(path: pathlib.Path) -> None:
    from tekoa.store.formats.t5x import step as t5x_step  # Imports JAX.

    t5x_step.check_complete(path)


def _sizes(path: pathlib.Path) -> Iterator[int]:
    for name, _ in durable.walk(path):
        # A step may be removed by its writer in the meantime.
        with contextlib.suppress(FileNotFoundError):
            yield (path / name).lstat().st_size
