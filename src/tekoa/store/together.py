"""One step made by several processes: each writes its part, process 0 commits.

Every phase ends in an exchange of what became of it, so that a failure of one process is
a failure on all of them, and all go on with the same thing. A process that dies instead
ends the others before anything is committed; see `core.hosts`.
"""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from tekoa.core.hosts import Hosts
from tekoa.store import array_writes, commit, errors, files
from tekoa.store import lease as lease_lib


def run(group: Hosts, what: str, work: Callable[[], Any]) -> list[Any]:
    """Does a piece of work on every process; gives all results, in order.

    Args:
        group: The processes.
        what: The work, in words; told if one of them does not come.
        work: Gives JSON data.

    Raises:
        errors.StoreError: If it failed on another process; of the same kind as there, if it is
            one of ours.
        Exception: What `work` raised here.
    """
    own: Exception | None = None
    try:
        outcome = {"value": work()}
    except Exception as error:
        own, kind = error, type(error).__name__
        code = getattr(error, "exit_code", errors.StoreError.exit_code)
        outcome = {"error": f"{kind}: {error}", "kind": kind, "code": code}
    outcomes = group.exchange(what, outcome)
    if own is not None:
        raise own
    for index, other in enumerate(outcomes):
        if "error" in other:
            kind = getattr(errors, other["kind"], errors.StoreError)
            error = kind(f"{what} failed on process {index}: {other['error']}")
            error.exit_code = other["code"]
            raise error
    return [other["value"] for other in outcomes]


def run_on_writer(group: Hosts, what: str, work: Callable[[], Any]) -> Any:
    """Does a piece of work on process 0 and gives its result to all; see `run`."""
    return run(group, what, work if group.is_writer else lambda: None)[0]


def save(
    group: Hosts,
    lease: lease_lib.Lease | None,
    what: str,
    *,
    step: int,
    write: Callable[[pathlib.Path], None],
    finish: Callable[[pathlib.Path], None],
    layout: str,
    facts: dict[str, Any],
) -> None:
    """Writes a step with all processes and commits it, or leaves nothing behind.

    Args:
        group: The processes.
        lease: The right to write in the directory; process 0 has it.
        what: The save, in words.
        step: The step.
        write: Called on every process with the temporary directory, to write its part.
        finish: Called with it on process 0 when all have written.
        layout: How the arrays are stored, for the manifest.
        facts: JSON values for the manifest.

    Raises:
        errors.StoreError: If it failed on another process, the step exists already or the
            lease is lost.
        OSError: If the disk refuses.
    """
    tmp: pathlib.Path | None = None

    def begin() -> str:
        assert lease is not None
        return str(commit.begin(lease, step))

    def write_part() -> dict[str, tuple[int, int]]:
        assert tmp is not None
        write(tmp)
        if group.count == 1:
            return {}
        return files.checksums(tmp, array_writes.own_files(tmp, group.index), sync=True)

    def publish() -> None:
        assert lease is not None
        assert tmp is not None
        finish(tmp)
        known = {path: (n, crc) for part in parts for path, (n, crc) in part.items()}
        commit.publish(lease, step, tmp, layout=layout, facts=facts, known=known)

    try:
        tmp = pathlib.Path(run_on_writer(group, f"{what}, start", begin))
        parts = run(group, f"{what}, all parts written", write_part)
        run_on_writer(group, f"{what}, commit", publish)
    except BaseException:
        if tmp is not None and group.is_writer:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
