"""Keeps a copy of a step in another directory, as the best or for good."""

import os
import pathlib
import shutil

from tekoa.store import commit, files, names, retention, steps
from tekoa.store import lease as lease_lib


def adopt(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, keep: int
) -> pathlib.Path:
    """Commits a copy of a step, its arrays byte for byte.

    Args:
        path: The directory of the step; it is checked before it is taken.
        directory: Where the copy goes; made if needed.
        keep: How many of the newest copies to keep there.

    Returns:
        The directory of the copy, which may have been there already.

    Raises:
        errors.DamagedError: If the step is not whole.
        errors.LeaseHeldError: If another process writes in the directory.
    """
    source = pathlib.Path(path)
    index = steps.open_step(source).index
    lease, is_first = lease_lib.acquire(directory)
    try:
        if is_first:
            commit.sweep(lease)
        if index.step not in names.list_steps(lease.directory):
            commit.commit(
                lease,
                index.step,
                lambda target: _copy(source, target),
                layout="t5x" if (source / names.T5X).is_file() else "tekoa",
                facts={"meta_hash": commit.meta_hash(index.meta)},
            )
        metrics = {step: {} for step in names.list_steps(lease.directory)}
        for step in retention.to_remove([retention.KeepLast(keep)], metrics, lease.directory):
            commit.remove(lease, step)
    finally:
        lease.release()
    return names.step_dir(directory, index.step)


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies all but the manifest, which is made anew from what was copied."""
    for path, is_dir in files.walk(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if is_dir:
            (target / path).mkdir(exist_ok=True)
        elif path != names.MANIFEST:
            shutil.copyfile(source / path, target / path)
