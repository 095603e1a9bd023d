"""Several processes that train together: who they are, and how they agree.

`jax.distributed` joins their devices. What the programs around the devices must agree on
(a seed, the step to restore, the moment to stop, that all have written their part of a
checkpoint) goes through `exchange`, over a connection of its own: JAX has no public name
for it that is bounded in time and can be used beside a running step. The same connection
notices a process that died or is stuck, and ends the others with `EXIT_PEER_LOST`.

One process alone is a group too, and asks nobody.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tekoa.core import hosts_link, hosts_start
from tekoa.core.hosts_start import HostsError as HostsError

# As sysexits' EX_UNAVAILABLE: what the program needs, here another process, is not there.
EXIT_PEER_LOST = 69
# How long the first may wait for the last: a large part of a save takes its time.
EXCHANGE_SECONDS = 1800.0
AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The processes that run this program together, as one of them sees them.

    Attributes:
        index: The number of this process, from 0.
        count: How many there are.
        link: The connection to the others; None for a process alone.
    """

    index: int = 0
    count: int = 1
    link: hosts_link.Link | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process writes logs, points, predictions and commits: process 0."""
        return self.index == 0

    def exchange(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> list[Any]:
        """Gives the values of all processes, in their order, once all have come here.

        May be called in any thread, by all processes in the same order for each name.

        Args:
            name: What this is about; it is told who did not come to it.
            value: JSON data.
            timeout_seconds: How long the first may wait for the last. Past it every
                process ends with `EXIT_PEER_LOST`.
        """
        if self.link is None:
            return [value]
        return self.link.exchange(name, value, timeout_seconds=timeout_seconds)

    def broadcast(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> Any:
        """Gives process 0's value to all; the others' are not looked at."""
        own = value if self.is_writer else None
        return self.exchange(name, own, timeout_seconds=timeout_seconds)[0]

    def agree(self, name: str, value: Mapping[str, Any]) -> None:
        """Checks that all processes hold the same values.

        Raises:
            HostsError: If they do not, on all of them.
        """
        first, *others = self.exchange(name, dict(value))
        for index, other in enumerate(others, 1):
            differ = [key for key in first if other.get(key) != first[key]]
            if differ:
                was, now = ({key: x.get(key) for key in differ} for x in (first, other))
                raise HostsError(
                    f"The processes do not agree on {name}: process 0 has {was}, process {index} "
                    f"has {now}. Give all of them the same command."
                )

    def watch_signals(self, signal_name: Callable[[], str | None]) -> None:
        """Lets the others know of a signal also while this process polls nothing."""
        if self.link is not None:
            self.link.signal_name = signal_name

    def is_stop_due(self, signal_name: str | None) -> bool:
        """Whether to stop now: the answer is the same at the same call on all processes."""
        if self.link is None:
            return signal_name is not None
        return self.link.is_stop_due(signal_name)

    def is_stop_agreed(self, signal_name: str | None) -> bool:
        """Whether all know that one was asked to stop; does not count as a poll."""
        if self.link is None:
            return signal_name is not None
        return self.link.is_stop_agreed(signal_name)

    def leave(self, code: int, why: str = "") -> None:
        """Ends this process's part; returns once the others have ended theirs.

        A process that failed does not return: JAX would wait for the others at its end.
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
    """The group that this process has joined; itself alone if it has joined none."""
    return _joined[0] if _joined else Hosts()


def join(
    address: str,
    n_processes: int | None = None,
    index: int | None = None,
    *,
    timeout_seconds: float = 60.0,
    start_timeout_seconds: float = 300.0,
) -> Hosts:
    """Joins the group and connects JAX's devices; before anything else is done with JAX.

    Args:
        address: `host:port` of process 0, which listens there and at the next port; or
            "auto" for what JAX finds out from the cluster (SLURM, Kubernetes, TPU pods).
        n_processes: How many processes there are; not with "auto".
        index: The number of this one; not with "auto".
        timeout_seconds: Silence after which a process counts as stuck.
        start_timeout_seconds: How long to wait for all to start.

    Raises:
        HostsError: If the processes do not come together.
    """
    import jax

    # Python's handlers are to see the signals, and all hosts learn of them from us.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    times = {"timeout_seconds": timeout_seconds, "start_timeout_seconds": start_timeout_seconds}
    if address == AUTO:
        hosts_start.initialise_jax(times)
        size, number = jax.process_count(), jax.process_index()
        link = _link(hosts_start.announce_hub(number, size, times), number, size, times)
    else:
        size, number = hosts_start.check_numbers(n_processes, index)
        host, port = hosts_start.parse_address(address)
        if number == 0:
            hosts_start.check_port(port)
            hosts_start.start_hub(port + 1, size, times)
        link = _link([(host, port + 1)], number, size, times)
        _joined[:] = [Hosts(index=number, count=size, link=link)]
        hosts_start.initialise_jax(
            times, coordinator_address=address, num_processes=size, process_id=number
        )
    hosts_start.delay_aborts()
    hosts_start.connect_devices()
    hosts = Hosts(index=number, count=size, link=link)
    _joined[:] = [hosts]
    return hosts


def _link(
    addresses: list[tuple[str, int]], index: int, n_processes: int, times: dict[str, float]
) -> hosts_link.Link:
    try:
        return hosts_link.Link(
            addresses, index=index, n_processes=n_processes, **times, on_lost=_end
        )
    except (hosts_link.RefusedError, TimeoutError) as error:
        raise HostsError(f"Process {index} of {n_processes} cannot join: {error}") from error


def _end(reason: str) -> None:
    """Ends this process: a collective without its peer would wait for ever."""
    sys.stdout.flush()
    print(
        f"tekoa: {reason} This process ends too (code {EXIT_PEER_LOST}); what was committed is "
        "whole. Start all processes again to go on.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_PEER_LOST)
