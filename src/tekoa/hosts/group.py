"""The group of processes that train together, and how they agree.

`jax.distributed` connects their devices. Everything else that the processes must agree on
(a seed, the step to restore, when to stop, whether all have written their part of a
checkpoint) is exchanged over a separate connection: JAX has no public function for it that
has a timeout and can be used during a step. The same connection detects processes that
died or hang, and ends the others with `EXIT_PEER_LOST`.

A single process is a group too, and exchanges nothing.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tekoa.hosts import connect
from tekoa.hosts import link as link_lib
from tekoa.hosts.connect import HostsError as HostsError

# EX_UNAVAILABLE of sysexits: something that the program needs, here a process, is missing.
EXIT_PEER_LOST = 69
# How long the first process may wait for the last; writing a large shard takes long.
EXCHANGE_SECONDS = 1800.0
AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The processes that run this program together, as seen by one of them.

    Attributes:
        index: The index of this process, from 0.
        count: The number of processes.
        link: The connection to the others; None for a single process.
    """

    index: int = 0
    count: int = 1
    link: link_lib.Link | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this is process 0, which writes logs, metrics, predictions and commits."""
        return self.index == 0

    def exchange(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> list[Any]:
        """Waits for all processes and returns their values, in the order of processes.

        Can be called in any thread. All processes must make the exchanges of a name in the
        same order.

        Args:
            name: The purpose, for messages about processes that are missing.
            value: JSON data.
            timeout_seconds: How long the first process may wait for the last. After that,
                every process ends with `EXIT_PEER_LOST`.
        """
        if self.link is None:
            return [value]
        return self.link.exchange(name, value, timeout_seconds=timeout_seconds)

    def broadcast(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> Any:
        """Returns the value of process 0 on all processes; other values are ignored."""
        sent = value if self.is_writer else None
        return self.exchange(name, sent, timeout_seconds=timeout_seconds)[0]

    def agree(self, name: str, value: Mapping[str, Any]) -> None:
        """Checks that all processes have the same values.

        Raises:
            HostsError: On all processes, if the values differ.
        """
        first, *others = self.exchange(name, dict(value))
        for index, other in enumerate(others, 1):
            differ = [key for key in first if other.get(key) != first[key]]
            if differ:
                a, b = ({key: x.get(key) for key in differ} for x in (first, other))
                raise HostsError(
                    f"The processes differ in {name}: process 0 has {a}, process {index} has {b}. "
                    "Start all of them with the same command."
                )

    def watch_signals(self, signal_name: Callable[[], str | None]) -> None:
        """Reports signals to the other processes even while this process does not poll."""
        if self.link is not None:
            self.link.signal_name = signal_name

    def is_stop_due(self, signal_name: str | None) -> bool:
        """Returns whether to stop now; the n-th call returns the same on all processes."""
        return signal_name is not None if self.link is None else self.link.is_stop_due(signal_name)

    def is_stop_agreed(self, signal_name: str | None) -> bool:
        """Returns whether all processes know of a stop signal; does not count as a poll."""
        if self.link is None:
            return signal_name is not None
        return self.link.is_stop_agreed(signal_name)

    def leave(self, code: int, why: str = "") -> None:
        """Leaves the group; returns when all other processes have left.

        If `code` is not 0 this exits: JAX would wait for the other processes at shutdown.
        """
        if self.link is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.link.leave(code, why)
        _joined.clear()
        if code != 0:
            os._exit(code)


_joined: list[Hosts] = []


def current() -> Hosts:
    """Returns the group that this process has joined, or a group of this process alone."""
    return _joined[0] if _joined else Hosts()


def join(
    address: str,
    n_processes: int | None = None,
    index: int | None = None,
    *,
    timeout_seconds: float = 60.0,
    start_timeout_seconds: float = 300.0,
) -> Hosts:
    """Joins the group and connects the devices. Must be called before any use of JAX.

    Args:
        address: `host:port` of process 0, which listens on this port and the next; or
            "auto" if JAX can detect the cluster (SLURM, Kubernetes, TPU pods).
        n_processes: Number of processes; not used with "auto".
        index: Index of this process, from 0; not used with "auto".
        timeout_seconds: Seconds without a heartbeat before a process is considered hung.
        start_timeout_seconds: How long to wait for all processes to start.

    Raises:
        HostsError: If the processes cannot form a group.
    """
    import jax

    # Signals must reach Python's handlers; all processes learn of them through the hub.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeouts = {"timeout_seconds": timeout_seconds, "start_timeout_seconds": start_timeout_seconds}
    if address == AUTO:
        connect.initialise_jax(timeouts)
        n_processes, index = jax.process_count(), jax.process_index()
        addresses = connect.announce_hub(index, n_processes, timeouts)
        hosts = _link(addresses, index, n_processes, timeouts)
    else:
        n_processes, index = connect.check_index(n_processes, index)
        host, port = connect.parse_address(address)
        if index == 0:
            connect.check_port(port)
            connect.start_hub(port + 1, n_processes, timeouts)
        hosts = _link([(host, port + 1)], index, n_processes, timeouts)
        # Joined from here on, so that a failure below is reported to the others.
        _joined[:] = [hosts]
        connect.initialise_jax(
            timeouts, coordinator_address=address, num_processes=n_processes, process_id=index
        )
    connect.delay_aborts()
    connect.connect_devices()
    _joined[:] = [hosts]
    return hosts


def _link(
    addresses: list[tuple[str, int]], index: int, n_processes: int, timeouts: dict[str, float]
) -> Hosts:
    """Connects this process to the hub of the group."""
    try:
        link = link_lib.Link(
            addresses, index=index, n_processes=n_processes, **timeouts, on_lost=_end
        )
        return Hosts(index=index, count=n_processes, link=link)
    except (link_lib.RefusedError, TimeoutError) as error:
        raise HostsError(f"Process {index} of {n_processes} cannot join: {error}") from error


def _end(reason: str) -> None:
    """Exits: a collective operation would wait forever for the lost process."""
    sys.stdout.flush()
    print(
        f"tekoa: {reason} Exiting with code {EXIT_PEER_LOST}. Committed checkpoints are intact; "
        "restart all processes to resume.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_PEER_LOST)
