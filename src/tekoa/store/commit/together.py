"""Work that the processes of a group do together on one step.

Each piece of work ends in an exchange of results, so that a failure on one process is a
failure on all, and all continue with the same values. If a process dies instead, the others
exit before anything is committed; see `tekoa.hosts`. One process alone is a group of one.
"""

from collections.abc import Callable
from typing import Any

from tekoa.hosts import Hosts
from tekoa.store import errors


def run_on_all(group: Hosts, what: str, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on every process and returns all results, in process order.

    Args:
        group: The processes.
        what: Describes the work, for messages; the same text on all processes.
        work: Returns JSON data.

    Raises:
        errors.StoreError: If `work` failed on another process. The class is the one raised
            there, if it is one of ours.
        Exception: Whatever `work` raised on this process.
    """
    own_error: Exception | None = None
    try:
        outcome = {"value": work()}
    except Exception as error:
        own_error, kind = error, type(error).__name__
        code = getattr(error, "exit_code", errors.StoreError.exit_code)
        outcome = {"error": f"{kind}: {error}", "kind": kind, "code": code}
    outcomes = group.exchange(what, outcome)
    if own_error is not None:
        raise own_error
    for index, other in enumerate(outcomes):
        if "error" in other:
            kind = getattr(errors, other["kind"], errors.StoreError)
            error = kind(f"{what} failed on process {index}: {other['error']}")
            error.exit_code = other["code"]
            raise error
    return [other["value"] for other in outcomes]


def run_on_writer(group: Hosts, what: str, work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0 and returns its result on all; see `run_on_all`."""
    return run_on_all(group, what, work if group.is_writer else lambda: None)[0]
