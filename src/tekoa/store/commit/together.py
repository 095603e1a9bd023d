"""Work that the processes of a group do together on one step.

Process 0 learns how each piece of work ended and sends the result to all, so that a failure on one
process is a failure on all, and all continue with the same values. If a process dies instead, the
others exit before anything is committed; see `tekoa.hosts`. One process alone is a group of one.

An error with an exit code of its own, such as damage or a usage error, has that code on all. Any
other is the fault of one process; for the rest it is the loss of that one.
"""

from collections.abc import Callable
from typing import Any

from tekoa.hosts import EXIT_PEER_LOST, Hosts
from tekoa.store import errors


def run_on_all(
    group: Hosts,
    what: str,
    work: Callable[[], Any],
    finish: Callable[[list[Any]], Any] = lambda results: results,
) -> Any:
    """Runs `work` on every process, then `finish` on process 0; returns its result on all.

    Args:
        group: The processes.
        what: Describes the work, for messages; the same text on all processes.
        work: Returns JSON data, which only process 0 receives.
        finish: Called with the results of all processes, in their order, if none failed. Returns
            JSON data; by default the results.

    Raises:
        errors.StoreError: If another process failed. The class is the one raised there, if it is
            one of ours.
        Exception: Whatever was raised on this process.
    """
    outcome, own_error = _attempt(group, work)
    outcomes = group.gather(what, outcome)
    if outcomes is not None:
        outcome = next((other for other in outcomes if "error" in other), None)
        if outcome is None:
            outcome, own_error = _attempt(group, lambda: finish([o["value"] for o in outcomes]))
    return _result(group, what, outcome, own_error)


def run_on_writer(group: Hosts, what: str, work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0 and returns its result on all; see `run_on_all`."""
    outcome, own_error = _attempt(group, work) if group.is_writer else (None, None)
    return _result(group, what, outcome, own_error)


def _attempt(group: Hosts, work: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    """Returns how `work` ended, as JSON, and its error."""
    try:
        return {"value": work()}, None
    except Exception as error:
        kind, code = type(error).__name__, getattr(error, "exit_code", EXIT_PEER_LOST)
        return {"error": f"{kind}: {error}", "kind": kind, "code": code, "on": group.index}, error


def _result(group: Hosts, what: str, outcome: Any, own_error: Exception | None) -> Any:
    """Returns the value of process 0 on all, or raises its error."""
    outcome = group.broadcast(what, outcome)
    if own_error is not None:
        raise own_error
    if "error" in outcome:
        kind = getattr(errors, outcome["kind"], errors.StoreError)
        error = kind(f"{what} failed on process {outcome['on']}: {outcome['error']}")
        error.exit_code = outcome["code"]
        raise error
    return outcome["value"]
