"""Atomic changes to a directory of steps.

A step is written under a temporary name, sealed with a manifest, synced, and renamed. It is
removed by first renaming it out of sight. Both happen inside the lease's fence.
"""

import contextlib
import errno
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tekoa import hosts
from tekoa.store import errors
from tekoa.store.commit import durable, fault_points, manifest, paths, together
from tekoa.store.commit.lease import Lease
from tekoa.store.mirror import registry


def commit(
    lease: Lease | None,
    step: int,
    write: Callable[[pathlib.Path], Iterable[str] | None],
    *,
    format: str,
    facts: dict[str, Any] | None = None,
    finish: Callable[[pathlib.Path], None] = lambda tmp: None,
    replace: bool = False,
    group: hosts.Hosts | None = None,
    what: str = "",
) -> pathlib.Path:
    """Writes a step and makes it visible, or leaves nothing behind.

    All processes of the group call this; process 0 creates the directory and commits.

    Args:
        lease: The right to write in the directory; only process 0 has it.
        step: The step number.
        write: Called on every process with the temporary directory, to write its files. It may
            return the paths of files that no other process touches; these are then
            checksummed by the process that wrote them.
        format: The format of the step, for the manifest.
        facts: JSON values for the manifest.
        finish: Called on process 0 with the directory, once all processes have written.
        replace: Whether to replace an existing step, which the caller knows to be committed.
        group: The processes that write; by default those of `hosts.current()`.
        what: Describes the save, for messages.

    Returns:
        The directory of the committed step.

    Raises:
        errors.StoreError: If the step exists, the lease is lost, or another process failed.
        OSError: If writing to disk fails.
    """
    group = group or hosts.current()
    what = what or f"save of step {step}"
    tmp: pathlib.Path | None = None

    def write_part() -> dict[str, tuple[int, int]]:
        assert tmp is not None
        return durable.checksums(tmp, write(tmp) or (), sync=True)

    def publish(parts: list[dict[str, tuple[int, int]]]) -> str:
        assert lease is not None
        assert tmp is not None
        finish(tmp)
        checksums = {path: (n, crc) for part in parts for path, (n, crc) in part.items()}
        fault_points.reach("before_manifest")
        manifest.seal(tmp, step=step, format=format, facts=facts or {}, checksums=checksums)
        return str(_rename(lease, tmp, step, replace=replace))

    try:
        begin = functools.partial(_begin, lease, step, replace=replace)
        tmp = pathlib.Path(together.run_on_writer(group, f"{what}, start", begin))
        return pathlib.Path(together.run_on_all(group, what, write_part, publish))
    except BaseException:
        if tmp is not None and group.is_writer:
            durable.remove(tmp)
        raise


def _begin(lease: Lease | None, step: int, *, replace: bool) -> str:
    """Creates the temporary directory of a step."""
    assert lease is not None
    final = paths.step_dir(lease.directory, step)
    if os.path.lexists(final) and not replace:
        raise errors.StoreError(f"{final} exists; a committed step is not overwritten.")
    tmp = paths.new_dir(lease.directory, step, "tmp")
    with lease.fence():
        os.mkdir(tmp)
    fault_points.reach("before_write")
    return str(tmp)


def _rename(lease: Lease, tmp: pathlib.Path, step: int, *, replace: bool) -> pathlib.Path:
    """Makes a sealed step visible; a step that it replaces is then removed."""
    final = paths.step_dir(lease.directory, step)
    fault_points.reach("before_rename")
    registry.check(lease.directory)
    with lease.fence():
        replaced = _swap(tmp, final) if replace and os.path.lexists(final) else None
        if replaced is None:
            os.rename(tmp, final)
    fault_points.reach("after_rename")
    durable.fsync(lease.directory)
    if replaced is not None:
        durable.remove(replaced)
    registry.notify(lease.directory)
    return final


def _swap(tmp: pathlib.Path, final: pathlib.Path) -> pathlib.Path:
    """Puts `tmp` in the place of an existing step and returns where that one is now."""
    try:
        durable.exchange(tmp, final)
        return tmp
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
    trash = paths.new_dir(final.parent, 0, "trash")
    os.rename(final, trash)
    os.rename(tmp, final)
    return trash


def remove(lease: Lease, step: int) -> None:
    """Removes a step; readers see all of it or none of it.

    Raises:
        errors.FencedError: If the lease is lost.
    """
    trash = paths.new_dir(lease.directory, step, "trash")
    fault_points.reach("before_gc")
    with lease.fence(), contextlib.suppress(FileNotFoundError):
        os.rename(paths.step_dir(lease.directory, step), trash)
    durable.remove(trash, on_file=lambda: fault_points.reach("mid_gc"))
    registry.notify(lease.directory)


def quarantine(lease: Lease, step: int) -> pathlib.Path:
    """Renames a damaged step so that it no longer counts, and returns its new path."""
    bad = paths.new_dir(lease.directory, step, "bad")
    with lease.fence():
        os.rename(paths.step_dir(lease.directory, step), bad)
    durable.fsync(lease.directory)
    return bad


def set_aside(lease: Lease, steps: Sequence[int]) -> pathlib.Path:
    """Moves valid steps into a subdirectory, where they no longer count, and returns its path.

    It is named after the highest step. If the program is killed, the next call for the remaining
    steps completes the same subdirectory.

    Args:
        lease: The right to write in the directory.
        steps: The steps, at least one.

    Raises:
        errors.FencedError: If the lease is lost.
    """
    # The highest step moves last: until then, a resumed run continues from it as before.
    ordered = sorted(steps)
    aside = next(
        path
        for path in paths.aside_dirs(lease.directory, ordered[-1])
        if not any(os.path.lexists(paths.step_dir(path, step)) for step in ordered)
    )
    with lease.fence():
        aside.mkdir(exist_ok=True)
        for step in ordered:
            os.rename(paths.step_dir(lease.directory, step), paths.step_dir(aside, step))
    durable.fsync(aside)
    durable.fsync(lease.directory)
    return aside
