"""Changes to a directory of steps that are whole or not there.

A step is written under a temporary name, sealed with a manifest, synced, and renamed;
it is removed by renaming it out of sight first. Both happen inside the lease's fence.
"""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from tekoa.store import errors, faultpoints, files, manifest, names
from tekoa.store import lease as lease_lib

_log = logging.getLogger("tekoa.store")


def commit(
    lease: lease_lib.Lease,
    step: int,
    write: Callable[[pathlib.Path], None],
    *,
    layout: str,
    facts: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a step and makes it visible, or leaves nothing behind.

    Args:
        lease: The right to write in the directory.
        step: The step.
        write: Called with the temporary directory to fill.
        layout: How the arrays are stored, for the manifest.
        facts: JSON values for the manifest.

    Returns:
        The directory of the committed step.

    Raises:
        errors.StoreError: If the step exists already, or the lease is lost.
        OSError: If the disk refuses.
    """
    tmp = begin(lease, step)
    try:
        write(tmp)
        return publish(lease, step, tmp, layout=layout, facts=facts)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def begin(lease: lease_lib.Lease, step: int) -> pathlib.Path:
    """Makes the temporary directory of a step that will be committed.

    Raises:
        errors.StoreError: If the step exists already, or the lease is lost.
    """
    final = names.step_dir(lease.directory, step)
    if final.exists():
        raise errors.StoreError(f"{final} exists; a committed step is never overwritten.")
    tmp = names.tmp_dir(lease.directory, step)
    with lease.fence():
        os.mkdir(tmp)
    faultpoints.reach("before_write")
    return tmp


def publish(
    lease: lease_lib.Lease,
    step: int,
    tmp: pathlib.Path,
    *,
    layout: str,
    facts: dict[str, Any] | None = None,
    known: Mapping[str, tuple[int, int]] | None = None,
) -> pathlib.Path:
    """Seals a step that is completely written and makes it visible.

    Args:
        lease: The right to write in the directory.
        step: The step.
        tmp: What `begin` gave.
        layout: How the arrays are stored, for the manifest.
        facts: JSON values for the manifest.
        known: As `manifest.seal` takes it.

    Returns:
        The directory of the committed step.

    Raises:
        errors.StoreError: If the lease is lost.
    """
    final = names.step_dir(lease.directory, step)
    faultpoints.reach("before_manifest")
    manifest.seal(tmp, step=step, layout=layout, facts=facts or {}, known=known)
    faultpoints.reach("before_rename")
    with lease.fence():
        os.rename(tmp, final)
    faultpoints.reach("after_rename")
    files.fsync(lease.directory)
    return final


def remove(lease: lease_lib.Lease, step: int) -> None:
    """Removes a step; a reader sees all of it or nothing of it.

    Raises:
        errors.FencedError: If the lease is lost.
    """
    trash = names.trash_dir(lease.directory)
    faultpoints.reach("before_gc")
    with lease.fence(), contextlib.suppress(FileNotFoundError):
        os.rename(names.step_dir(lease.directory, step), trash)
    _empty(trash)


def quarantine(lease: lease_lib.Lease, step: int) -> pathlib.Path:
    """Puts a bad step aside under another name; its bytes stay for an examination.

    Returns:
        Where it went.
    """
    bad = names.bad_dir(lease.directory, step)
    with lease.fence():
        os.rename(names.step_dir(lease.directory, step), bad)
    files.fsync(lease.directory)
    return bad


def sweep(lease: lease_lib.Lease) -> None:
    """Removes what dead writers left: temporary and half-deleted steps.

    Only for a lease that was just taken: nobody of this process writes yet.
    """
    with lease.fence():
        left = [
            path for kind in ("tmp", "trash") for path in names.unfinished(lease.directory, kind)
        ]
        for path in left:
            _empty(path)
    if left:
        _log.warning("%s: removed %d unfinished steps", lease.directory, len(left))


def meta_hash(meta: dict[str, Any]) -> str:
    """Gives a short hash of JSON values, for the manifest."""
    return f"{zlib.crc32(json.dumps(meta, sort_keys=True).encode()):08x}"


def _empty(directory: pathlib.Path) -> None:
    if not directory.is_dir():
        return
    for path, is_dir in files.walk(directory):
        if not is_dir:
            (directory / path).unlink(missing_ok=True)
            faultpoints.reach("mid_gc")
    shutil.rmtree(directory, ignore_errors=True)
