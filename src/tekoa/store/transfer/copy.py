"""Copies of a step in another directory, unchanged or in another format."""

import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from tekoa import hosts
from tekoa.core import files
from tekoa.store.commit import commit, durable, identity, manifest, paths, retention
from tekoa.store.commit.lease import held
from tekoa.store.formats.step import Format, finish_step, is_committed, open_step, write_step
from tekoa.store.read.load import open_newest


def copy_step(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> pathlib.Path:
    """Commits a byte-for-byte copy of a step in another directory, with the same identity.

    A step of the same number and another identity, from another history, is replaced. One
    process copies alone, even in a program of several.

    Args:
        path: The directory of the step; it is verified first.
        directory: The directory of steps for the copy; created if needed.

    Returns:
        The directory of the copy, which may have existed before.

    Raises:
        errors.DamagedError: If the step is incomplete.
        errors.LeaseHeldError: If another process is writing to the directory.
    """
    source = files.local_path(path)
    opened = open_step(source)
    index, target = opened.index, paths.step_dir(directory, opened.index.step)
    with held(directory) as lease:
        exists = is_committed(target)
        if not exists or identity.commit_id(target) != opened.commit:
            commit.commit(
                lease,
                index.step,
                lambda tmp: _copy_files(source, tmp),
                format="t5x",  # All others have a manifest, which is copied.
                replace=exists,
                group=hosts.Hosts(),
            )
    return target


def _copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the files of a step, and its manifest if it has one."""
    try:
        names = [*manifest.read(source).files, paths.MANIFEST]
    except FileNotFoundError:
        names = [path for path, is_dir in durable.walk(source) if not is_dir]
        names = [name for name in names if name != retention.PINNED]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def convert(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: Format,
    step: int | None = None,
    axes: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a checkpoint into another directory, in the requested format.

    One process converts alone, even in a program of several.

    Args:
        source: A path as for `load`.
        directory: The directory of steps for the result; created if needed.
        format: 'native' or 't5x'.
        step: The step to convert; by default the newest valid one.
        axes: For 't5x': by item, a tree of axes as for `t5x.write`.

    Returns:
        The directory of the new step. Values, dtypes, names and meta are the same.

    Raises:
        errors.StoreError: If there is no usable source, or the step already exists.
    """
    directory = files.local_path(directory)
    opened = open_newest(source, step=step)
    index = opened.index
    values = opened.read(index.leaves, {})

    def write(tmp: pathlib.Path) -> Iterable[str]:
        return write_step(tmp, index, values, format=format, axes=axes or {})

    with held(directory) as lease:
        return commit.commit(
            lease,
            index.step,
            write,
            finish=lambda tmp: finish_step(tmp, index, format=format),
            format=format,
            facts=identity.start_facts(opened.commit.digest),
            group=hosts.Hosts(),
        )
