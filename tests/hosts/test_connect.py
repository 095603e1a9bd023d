import socket
import subprocess
import sys

import pytest

from tekoa import hosts
from tekoa.estimator.cli.launch import free_port
from tekoa.hosts import connect


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:x", "host:²", "host:99999"])
def test_an_invalid_address_is_an_error(address):
    with pytest.raises(hosts.HostsError, match="host:port"):
        hosts.join(address, 2, 1)


@pytest.mark.parametrize(("n", "index"), [(None, 0), (2, None), (2, 2), (2, -1)])
def test_a_group_needs_its_size_and_a_valid_index(n, index):
    with pytest.raises(hosts.HostsError, match=f"got {n} processes and index {index}"):
        hosts.join("127.0.0.1:80", n, index)


def test_a_port_in_use_is_an_error():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(hosts.HostsError, match=f"Cannot listen on port {port}:"):
            hosts.join(f"127.0.0.1:{port}", 2, 0)


def test_a_process_0_that_does_not_answer_is_an_error():
    port = free_port()
    message = f"process 0 does not answer at 127.0.0.1:{port}"
    with pytest.raises(hosts.HostsError, match=message):
        hosts.join(f"127.0.0.1:{port}", 2, 1, start_timeout_seconds=0.1)


def test_an_index_can_be_used_once_per_address():
    address = f"127.0.0.1:{free_port()}"
    program = (
        "import sys\n"
        "from tekoa.hosts import connect\n"
        "connect.claim(sys.argv[1], 1)\n"
        "print('claimed', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        connect.claim(address, 0)
        with pytest.raises(hosts.HostsError, match="already is a process 1"):
            connect.claim(address, 1)
        other.kill()
        other.wait()
        connect.claim(address, 1)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("node", False)],
)
def test_only_loopback_addresses_are_local(host, expected):
    assert connect.is_loopback(host) is expected


def test_process_0_listens_on_loopback_only_if_the_address_is_local():
    address = f"127.0.0.1:{free_port()}"
    assert connect.prepare(address, 2, 0, 1.0)["coordinator_bind_address"] == address
    assert "coordinator_bind_address" not in connect.prepare(f"0.0.0.0:{free_port()}", 2, 0, 1.0)
