"""Several processes in one run: joining, leaving and dividing the rows of a batch."""

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tekoa import hosts
from tekoa.core import files
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import FLAG_NAMES, RunConfig, UsageError
from tekoa.store.mirror import urls

_PER_PROCESS_FLAGS = ("process_id", "progress")


def join(config: RunConfig) -> RunConfig:
    """Joins the group of processes set by the flags; returns the flags for this process.

    Only process 0 prints.

    Raises:
        UsageError: If a flag is set without `--coordinator_address`.
        hosts.HostsError: If the processes cannot connect, or their flags differ.
    """
    if config.coordinator_address is None:
        for name in ("num_processes", "process_id"):
            if name in config.set_flags:
                raise UsageError(f"--{name} needs --coordinator_address=HOST:PORT of process 0.")
        return config
    import importlib.metadata  # Slow to import; most runs are one process.

    _check_not_complete(config)
    group = hosts.join(
        config.coordinator_address,
        config.num_processes,
        config.process_id,
        timeout_seconds=config.host_timeout_secs,
    )
    group.agree("versions", {name: importlib.metadata.version(name) for name in ("tekoa", "jax")})
    shared = {n: str(getattr(config, n)) for n in FLAG_NAMES if n not in _PER_PROCESS_FLAGS}
    group.agree("flags", {**shared, "module_config": dict(config.overrides)})
    if group.is_writer:
        return config
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    return dataclasses.replace(config, progress=False)


def _check_not_complete(config: RunConfig) -> None:
    """Raises `HostsError` if the group already runs: JAX aborts it if another process joins.

    Its process 0 then holds the lease of the run, or of an evaluation. With "auto" the numbers are
    those of the cluster.
    """
    address, path = config.coordinator_address, config.model_dir
    # Slow to import; most runs are one process.
    from tekoa.hosts.group import AUTO
    from tekoa.store.commit import lease

    if path is None or urls.is_url(path) or address in (None, AUTO):
        return

    run = files.local_path(path)
    for directory in (run, run / config.eval_label):
        with contextlib.suppress(OSError):
            if lease.is_held_by(directory, address):
                raise hosts.HostsError(
                    f"There already is a process {config.process_id} of the group at {address}: "
                    f"its processes have all joined, and use {directory}. Choose another "
                    "--process_id, or another address for another group."
                )


def leave(code: int) -> None:
    """Leaves the group, if there is one, with the exit code of the command."""
    if "tekoa.hosts.group" in sys.modules:  # Help and usage errors have no group.
        hosts.current().leave(code)


def leave_after_crash(error: BaseException) -> None:
    """Prints the traceback and leaves the group; does nothing without a group."""
    group = hosts.current()
    if group.count > 1:
        traceback.print_exception(error)
        group.leave(ExitCode.UNEXPECTED, f"{type(error).__name__}: {error}")


def shard(layout: Any, size: int, flag: str) -> tuple[int, int]:
    """Returns the index of the part of each batch that this process reads, and their number.

    Args:
        layout: The layout of the run; None for one device.
        size: Rows per batch, across all processes.
        flag: The flag that sets the size, for the error.

    Raises:
        UsageError: If the rows cannot be divided evenly.
    """
    if layout is None:
        return 0, 1
    from tekoa.sharding import layout as layout_lib

    try:
        rows = layout_lib.local_rows(layout, size)
    except ValueError as error:
        raise UsageError(f"--{flag}: {error}") from None
    n_rows = rows.stop - rows.start
    return rows.start // n_rows, size // n_rows


def own_rows(
    layout: Any,
    batches: Callable[..., Any],
    *,
    n_examples: int,
    size: int,
    flag: str,
    whole: Callable[[Any], Any],
) -> Iterator[Any]:
    """Yields one pass over the data: this process's rows of each batch, then the remainder.

    A last batch that is not full cannot be divided evenly: every process reads all of it,
    and every device computes it.

    Args:
        layout: The layout of the run.
        batches: Creates a stream of batches; accepts `shard` and `remainder`.
        n_examples: Number of examples.
        size: Rows of a full batch, across all processes.
        flag: The flag that sets the size, for errors.
        whole: Replicates a batch on all devices.
    """
    n_full = n_examples // size
    if n_full:
        yield from batches(shard=shard(layout, size, flag), remainder="drop")
    if n_examples % size:
        rest = batches(shard=(0, 1), remainder="keep")
        rest.seek(n_full)
        yield from map(whole, rest)
