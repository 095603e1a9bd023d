"""Connects the processes of a group: addresses, ports and `jax.distributed`.

Used only by `hosts.join`.
"""

import hashlib
import ipaddress
import os
import socket
import sys
import time
from typing import Any


class HostsError(RuntimeError):
    """Processes cannot form a group, such as for a wrong index or a port in use.

    >>> from tekoa import hosts
    >>> group = hosts.join('localhost:7890', 2, 5)
    Traceback (most recent call last):
    ...
    tekoa.hosts.connect.HostsError: ... got 2 processes and index 5.
    """

    exit_code = 2


def prepare(
    address: str, n_processes: int | None, index: int | None, timeout_seconds: float
) -> dict[str, Any]:
    """Checks the address and the index of this process; returns arguments for `initialise_jax`.

    JAX itself aborts the program, or even the whole group, for most of the mistakes found here.
    """
    if n_processes is None or index is None or not 0 <= index < n_processes:
        raise HostsError(
            "A group needs the number of processes N and the index of this process, 0 to N-1; "
            f"got {n_processes} processes and index {index}."
        )
    host, port = parse_address(address)
    claim(address, index)
    if index == 0:
        check_port("" if not is_loopback(host) else host, port)
    else:
        wait_for_service(host, port, index, timeout_seconds)
    arguments = {
        "coordinator_address": address,
        "num_processes": n_processes,
        "process_id": index,
    }
    # By default JAX listens on all interfaces.
    return arguments | ({"coordinator_bind_address": address} if is_loopback(host) else {})


def initialise_jax(**arguments: Any) -> None:
    """Connects the devices of all processes, at an address or by JAX's cluster detection."""
    import jax

    # The service turns SIGTERM into a request to stop; see `Hosts.is_stop_due`.
    jax.config.update("jax_enable_preemption_service", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        raise HostsError(f"JAX cannot connect the processes: {error}") from error


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


def parse_address(address: str) -> tuple[str, int]:
    """Parses `host:port`.

    >>> parse_address('node0:9000'), parse_address('[::1]:9000')
    (('node0', 9000), ('::1', 9000))
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise HostsError(
            f"The coordinator address must be 'host:port' of process 0, or 'auto', got {address!r}."
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine can reach an address.

    >>> is_loopback('127.0.0.1'), is_loopback('node0')
    (True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def claim(address: str, index: int) -> None:
    """Reserves an index on this machine, if it runs Linux, until the process ends.

    If two processes join with one index, JAX aborts the group.
    """
    if sys.platform != "linux":
        return
    # A name without a file, which the system frees however the process ends.
    digest = hashlib.sha256(f"{os.getuid()} {address} {index}".encode()).hexdigest()
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0tekoa-{digest}")
    except OSError:
        name.close()
        raise HostsError(
            f"There already is a process {index} of the group at {address} on this machine. Choose "
            "another --process_id, or another address for another group."
        ) from None
    name.detach()  # It stays open until the process ends.


def check_port(host: str, port: int) -> None:
    """Raises a clear error if a port is in use; JAX would share it with another run."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise HostsError(
            f"Cannot listen on port {port}: {os.strerror(error.errno or 0)}. Process 0 needs the "
            "port of the coordinator address. If another run or a second process 0 uses it, choose "
            "another port, the same for all processes."
        ) from error


def wait_for_service(host: str, port: int, index: int, timeout_seconds: float) -> None:
    """Waits until process 0 listens: if JAX cannot connect, it aborts."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostsError(
                    f"Process {index} cannot join: process 0 does not answer at {host}:{port} "
                    f"({error}). Check the coordinator address, and whether process 0 runs."
                ) from None
            time.sleep(0.1)
