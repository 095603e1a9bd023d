"""The command as one of several processes: joining them, agreeing, sharing out rows."""

import dataclasses
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tekoa.core import hosts
from tekoa.estimator.config import FLAG_NAMES, RunConfig, UsageError

_OWN_FLAGS = ("process_id", "progress")


def join(config: RunConfig) -> RunConfig:
    """Joins the processes that the flags name; gives the flags for this one.

    Only process 0 prints.

    Raises:
        UsageError: If only some of the flags were given.
        hosts.HostsError: If the processes do not come together, or differ in their flags.
    """
    if config.coordinator_address is None:
        for name in ("num_processes", "process_id"):
            if name in config.given:
                raise UsageError(f"--{name} needs --coordinator_address=HOST:PORT of process 0.")
        return config
    group = hosts.join(
        config.coordinator_address,
        config.num_processes,
        config.process_id,
        timeout_seconds=config.host_timeout_secs,
    )
    group.agree("versions", {name: importlib.metadata.version(name) for name in ("tekoa", "jax")})
    flags = {name: str(getattr(config, name)) for name in FLAG_NAMES if name not in _OWN_FLAGS}
    group.agree("flags", {**flags, "module_config": dict(config.overrides)})
    if group.is_writer:
        return config
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    return dataclasses.replace(config, progress=False)


def ended(run: Callable[[], int]) -> int:
    """Runs the command, and leaves the group that it joined with its exit code."""
    try:
        code = run()
    except BaseException as error:
        if hosts.current().count > 1:
            traceback.print_exc()
            hosts.current().leave(1, f"{type(error).__name__}: {error}")
        raise
    hosts.current().leave(code)
    return code


def shard(layout: Any, size: int, flag: str) -> tuple[int, int]:
    """Which part of every batch this process reads: its number, and how many there are.

    Args:
        layout: How the run is laid out; None for one device.
        size: Rows of a batch over all processes.
        flag: Where the size comes from.

    Raises:
        UsageError: If the rows do not divide.
    """
    if layout is None:
        return 0, 1
    from tekoa.core import sharding

    try:
        rows = sharding.local_rows(layout, size)
    except ValueError as error:
        raise UsageError(f"--{flag}: {error}") from None
    n_own = rows.stop - rows.start
    return rows.start // n_own, size // n_own


def own_rows(
    layout: Any,
    batches: Callable[..., Any],
    *,
    n_examples: int,
    size: int,
    flag: str,
    whole: Callable[[Any], Any],
) -> Iterator[Any]:
    """One pass over data: this process's rows of each full batch, then what is left, whole.

    A last batch that is not full cannot be shared out evenly: all processes read it, and
    each of their devices runs all of it.

    Args:
        layout: How the run is laid out.
        batches: Makes a stream of batches; takes `shard` and `remainder`.
        n_examples: How many examples there are.
        size: Rows of a full batch over all processes.
        flag: Where the size comes from.
        whole: Puts a batch that all processes hold on all devices.
    """
    n_full = n_examples // size
    if n_full:
        yield from batches(shard=shard(layout, size, flag), remainder="drop")
    if n_examples % size:
        rest = batches(shard=(0, 1), remainder="keep")
        state = rest.state()
        rest.restore({**state, "batches": {**state["batches"], "batch": n_full}})
        yield from map(whole, rest)
