"""Opening and writing one step, whatever its format."""

import functools
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tekoa import hosts
from tekoa.core import files as files_lib
from tekoa.core import trees
from tekoa.store import errors
from tekoa.store.commit import identity, manifest, paths
from tekoa.store.formats import arrays_read, arrays_write, checked
from tekoa.store.formats.index import Index, OpenStep, read_index, write_index
from tekoa.store.formats.t5x import step as t5x_step

Format = Literal["native", "t5x"]


def open_step(
    path: str | os.PathLike[str],
    *,
    verify: manifest.Verify = "full",
    part: tuple[int, int] = (0, 1),
) -> OpenStep:
    """Opens one step, after checking its files against its manifest.

    Args:
        path: The directory of the step.
        verify: How thoroughly to check the files.
        part: (index, count): check only every count-th file, starting with file `index`.

    Raises:
        errors.DamagedError: If it is incomplete, or not a checkpoint at all.
        errors.NewerVersionError: If a later version of Tekoa wrote it.
    """
    path = files_lib.local_path(path)
    sealed = checked.read_manifest(path)
    checked.check_files(path, sealed, verify=verify, part=part)
    if sealed is None:
        t5x_step.check_complete(path)
    format = "t5x" if sealed is None else sealed.format
    if format == "t5x":
        index, read = t5x_step.open_step(path)
    elif format == "native":
        index, read = read_index(path), functools.partial(arrays_read.read, path)
    else:
        raise errors.NewerVersionError(
            f"{path}: the step has the format {format!r}, which this Tekoa does not know. Update "
            "Tekoa to use it; nothing was changed."
        )
    commit = identity.commit_id(path) if sealed is None else identity.of_manifest(sealed)
    return OpenStep(index=index, read=read, commit=commit)


def find(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Returns the directory of an existing step.

    Raises:
        errors.StoreError: If it does not exist; lists the steps that do.
    """
    path = paths.step_dir(directory, step)
    if not path.is_dir():
        raise errors.StoreError(
            f"{directory}: has no step {step}. Existing steps: {paths.list_steps(directory)}."
        )
    return path


def is_step(path: pathlib.Path) -> bool:
    """Returns whether `path` is one step rather than a directory of steps."""
    return (path / paths.MANIFEST).exists() or checked.is_t5x(path)


def is_committed(path: pathlib.Path) -> bool:
    """Returns whether a directory is a committed step, by its manifest, or by T5X and complete."""
    try:
        if (path / paths.MANIFEST).exists():
            return manifest.read(path).step == paths.parse_step(path.name)
        checked.check_files(path, checked.read_manifest(path), verify="none")
        t5x_step.check_complete(path)
        return t5x_step.open_step(path)[0].step == paths.parse_step(path.name)
    except (errors.StoreError, OSError):
        return False


def write_step(
    directory: pathlib.Path,
    index: Index,
    values: Mapping[trees.Name, Any],
    *,
    format: Format,
    axes: Mapping[str, Any],
) -> Iterable[str]:
    """Writes this process's files of a step.

    `finish_step` must follow on one process, once all processes have written.

    Args:
        directory: The temporary directory of the step.
        index: The index of the step.
        values: Arrays by name.
        format: 'native' or 't5x'.
        axes: For 't5x': by item, a tree of axes as for `t5x.write`.

    Returns:
        The files that no other process touches.
    """
    group = hosts.current()
    if format == "native":
        arrays_write.write(directory, values)
        return arrays_write.own_files(directory, group.index)
    t5x_step.write(directory, index, values, axes)
    return ()


def finish_step(directory: pathlib.Path, index: Index, *, format: Format) -> None:
    """Writes the files that a step has once, however many processes wrote its arrays."""
    if format == "native":
        arrays_write.merge(directory)
        write_index(directory, index)
