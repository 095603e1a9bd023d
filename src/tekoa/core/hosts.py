"""Several processes that train together: who they are, and how they agree.

`jax.distributed` joins their devices. What the programs around the devices must agree on
(a seed, the step to restore, the moment to stop, that all have written their part of a
checkpoint) goes through `exchange`, over a connection of its own: JAX has no public name
for it that is bounded in time and can be used beside a running step. The same connection
notices a process that died or is stuck, and ends the others with `EXIT_PEER_LOST`.

One process alone is a group too, and asks nobody.
"""

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tekoa.core import hosts_hub, hosts_link

# As sysexits' EX_UNAVAILABLE: what the program needs, here another process, is not there.
EXIT_PEER_LOST = 69
# From the slowest process's start of an exchange to the fastest one's.
EXCHANGE_SECONDS = 1800.0
AUTO = "auto"

_log = logging.getLogger("tekoa.hosts")


class HostsError(RuntimeError):
    """Processes that do not come together: a wrong number, a port that is taken."""

    exit_code = 2


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
        _initialise(times)
        size, number = jax.process_count(), jax.process_index()
        link = _link(_announced(number, size, times), number, size, times)
    else:
        size, number = _numbers(n_processes, index)
        host, port = _parsed(address)
        if number == 0:
            _check_port(port)
            _start_hub(port + 1, size, times)
        link = _link([(host, port + 1)], number, size, times)
        _joined[:] = [Hosts(index=number, count=size, link=link)]
        _initialise(times, coordinator_address=address, num_processes=size, process_id=number)
    _delay_aborts()
    _connect_devices()
    hosts = Hosts(index=number, count=size, link=link)
    _joined[:] = [hosts]
    return hosts


def _connect_devices() -> None:
    """Lets collectives on CPU greet one another now, and not on standard output."""
    import jax
    import numpy as np

    if jax.default_backend() != "cpu":
        return
    devices = jax.devices()
    rows = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("rows",)), jax.P("rows"))
    ones = jax.make_array_from_callback((len(devices),), rows, lambda part: np.ones(1, np.int32))
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        jax.block_until_ready(jax.jit(lambda x: x.sum())(ones))
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _initialise(times: dict[str, float], **where: Any) -> None:
    import jax

    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=round(times["start_timeout_seconds"]),
            # JAX aborts without a code of ours: it must notice later than we do.
            heartbeat_timeout_seconds=round(3 * times["timeout_seconds"]) + 60,
        )
    except (RuntimeError, ValueError) as error:
        raise HostsError(f"JAX cannot join the processes: {error}") from error


def _numbers(n_processes: int | None, index: int | None) -> tuple[int, int]:
    if n_processes is None or index is None or not 0 <= index < n_processes:
        raise HostsError(
            "A group needs its size and this process's number: --num_processes=N and "
            f"--process_id=0 to N-1, got {n_processes} and {index}."
        )
    return n_processes, index


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16 - 1:
        raise HostsError(
            f"--coordinator_address must be 'host:port' of process 0, or 'auto', got {address!r}."
        )
    return host.strip("[]"), int(port)


def _check_port(port: int) -> None:
    """JAX would say no more than that its server did not start."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise _taken(port, error) from error


def _taken(port: int, error: OSError) -> HostsError:
    return HostsError(
        f"Port {port} cannot be listened at: {os.strerror(error.errno or 0)}. Process 0 needs "
        "the port of --coordinator_address and the next one; another run, or a second process "
        "0, has it. Choose another port, the same for all processes."
    )


def _start_hub(port: int, n_processes: int, times: dict[str, float]) -> hosts_hub.Hub:
    try:
        return hosts_hub.Hub(
            "", port, n_processes=n_processes, timeout_seconds=times["timeout_seconds"]
        )
    except OSError as error:
        raise _taken(port, error) from error


def _announced(index: int, n_processes: int, times: dict[str, float]) -> list[tuple[str, int]]:
    """Where process 0's hub is, told over JAX's devices: its address is not public."""
    import numpy as np
    from jax.experimental import multihost_utils

    text = np.zeros(256, np.uint8)
    if index == 0:
        hub = _start_hub(0, n_processes, times)
        body = f"{_own_address()} {socket.getfqdn()} {hub.port}".encode()
        text[: len(body)] = np.frombuffer(body, np.uint8)
    told = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).rstrip(b"\0").decode()
    *names, port = told.split()
    return [(name, int(port)) for name in (["127.0.0.1"] if index == 0 else names)]


def _own_address() -> str:
    """The address under which this machine is seen by others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


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


def _delay_aborts() -> None:
    """Lets `_end` come first where JAX aborts because process 0 is gone.

    The handler of SIGABRT is the C function `sleep`, which takes the signal's number, 6,
    for seconds: no Python runs in it, and an abort for any other reason is only later.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), libc.sleep)
