"""How a group comes together: addresses, ports, JAX's own start.

Used by `hosts.join` alone.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from typing import Any

from tekoa.core import hosts_hub


class HostsError(RuntimeError):
    """Processes that do not come together: a wrong number, a port that is taken."""

    exit_code = 2


def connect_devices() -> None:
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


def initialise_jax(times: dict[str, float], **where: Any) -> None:
    """Joins the devices, at an address that is given or found by JAX."""
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


def check_numbers(n_processes: int | None, index: int | None) -> tuple[int, int]:
    """Gives size and number back if they can be those of a group."""
    if n_processes is None or index is None or not 0 <= index < n_processes:
        raise HostsError(
            "A group needs its size and this process's number: --num_processes=N and "
            f"--process_id=0 to N-1, got {n_processes} and {index}."
        )
    return n_processes, index


def parse_address(address: str) -> tuple[str, int]:
    """Reads `host:port`; the next port must be one too.

    >>> parse_address('node0:9000'), parse_address('[::1]:9000')
    (('node0', 9000), ('::1', 9000))
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16 - 1:
        raise HostsError(
            f"--coordinator_address must be 'host:port' of process 0, or 'auto', got {address!r}."
        )
    return host.strip("[]"), int(port)


def check_port(port: int) -> None:
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


def start_hub(port: int, n_processes: int, times: dict[str, float]) -> hosts_hub.Hub:
    """Starts process 0's hub."""
    try:
        return hosts_hub.Hub(
            "", port, n_processes=n_processes, timeout_seconds=times["timeout_seconds"]
        )
    except OSError as error:
        raise _taken(port, error) from error


def announce_hub(index: int, n_processes: int, times: dict[str, float]) -> list[tuple[str, int]]:
    """Where process 0's hub is, told over JAX's devices: its address is not public."""
    import numpy as np
    from jax.experimental import multihost_utils

    text = np.zeros(256, np.uint8)
    if index == 0:
        hub = start_hub(0, n_processes, times)
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


def delay_aborts() -> None:
    """Lets `_end` come first where JAX aborts because process 0 is gone.

    The handler of SIGABRT is the C function `sleep`, which takes the signal's number, 6,
    for seconds: no Python runs in it, and an abort for any other reason is only later.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), libc.sleep)
