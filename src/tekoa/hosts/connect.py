"""Connects the processes of a group: addresses, ports and `jax.distributed`.

Used only by `hosts.join`.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from typing import Any

from tekoa.hosts import hub as hub_lib


class HostsError(RuntimeError):
    """Processes cannot form a group, such as for a wrong index or a port in use."""

    exit_code = 2


def connect_devices() -> None:
    """Connects the CPU collectives now, with their start-up messages on standard error."""
    import jax
    import numpy as np

    if jax.default_backend() != "cpu":
        return
    devices = jax.devices()
    rows = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("rows",)), jax.P("rows"))
    ones = jax.make_array_from_callback((len(devices),), rows, lambda _: np.ones(1, np.int32))
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        jax.block_until_ready(jax.jit(lambda x: x.sum())(ones))
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def initialise_jax(timeouts: dict[str, float], **address: Any) -> None:
    """Connects the devices of all processes, at an address or by JAX's cluster detection."""
    import jax

    try:
        jax.distributed.initialize(
            **address,
            initialization_timeout=round(timeouts["start_timeout_seconds"]),
            # JAX aborts with another exit code, so the hub must notice a lost process first.
            heartbeat_timeout_seconds=round(3 * timeouts["timeout_seconds"]) + 60,
        )
    except (RuntimeError, ValueError) as error:
        raise HostsError(f"JAX cannot connect the processes: {error}") from error


def check_index(n_processes: int | None, index: int | None) -> tuple[int, int]:
    """Returns the arguments if they are valid for a process of a group."""
    if n_processes is None or index is None or not 0 <= index < n_processes:
        raise HostsError(
            "A group needs the number of processes N and the index of this process, 0 to N-1; "
            f"got {n_processes} processes and index {index}."
        )
    return n_processes, index


def parse_address(address: str) -> tuple[str, int]:
    """Parses `host:port`; the next port must be a valid port too.

    >>> parse_address('node0:9000'), parse_address('[::1]:9000')
    (('node0', 9000), ('::1', 9000))
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16 - 1:
        raise HostsError(
            f"The coordinator address must be 'host:port' of process 0, or 'auto', got {address!r}."
        )
    return host.strip("[]"), int(port)


def check_port(port: int) -> None:
    """Raises a clear error if a port is in use; JAX reports only that its server failed."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise _port_error(port, error) from error


def _port_error(port: int, error: OSError) -> HostsError:
    return HostsError(
        f"Cannot listen on port {port}: {os.strerror(error.errno or 0)}. Process 0 needs the port "
        "of the coordinator address and the next one. If another run or a second process 0 uses "
        "it, choose another port, the same for all processes."
    )


def start_hub(port: int, n_processes: int, timeouts: dict[str, float]) -> hub_lib.Hub:
    """Starts the hub in process 0."""
    try:
        return hub_lib.Hub(
            "", port, n_processes=n_processes, timeout_seconds=timeouts["timeout_seconds"]
        )
    except OSError as error:
        raise _port_error(port, error) from error


def announce_hub(index: int, n_processes: int, timeouts: dict[str, float]) -> list[tuple[str, int]]:
    """Starts the hub in process 0 and broadcasts its addresses over the devices.

    JAX has no public name for the coordinator address that it detected.
    """
    import numpy as np
    from jax.experimental import multihost_utils

    text = np.zeros(256, np.uint8)
    if index == 0:
        hub = start_hub(0, n_processes, timeouts)
        body = f"{_own_address()} {socket.getfqdn()} {hub.port}".encode()
        text[: len(body)] = np.frombuffer(body, np.uint8)
    received = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).rstrip(b"\0")
    *names, port = received.decode().split()
    return [(name, int(port)) for name in (["127.0.0.1"] if index == 0 else names)]


def _own_address() -> str:
    """Returns the address of this machine in its network, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def delay_aborts() -> None:
    """Delays SIGABRT, so that `_end` sets the exit code when JAX aborts without process 0.

    The handler of SIGABRT is the C function `sleep`, whose argument is the signal's number, 6.
    It runs no Python, and an abort for any other reason is only delayed by 6 seconds.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), libc.sleep)
