import signal
import socket
import subprocess
import sys

import pytest

from tekoa import hosts
from tekoa.hosts import connect


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:x", "host:99999"])
def test_an_invalid_address_is_an_error(address):
    with pytest.raises(hosts.HostsError, match="host:port"):
        hosts.join(address, 2, 1)


@pytest.mark.parametrize(("n", "index"), [(None, 0), (2, None), (2, 2), (2, -1)])
def test_a_group_needs_its_size_and_a_valid_index(n, index):
    with pytest.raises(hosts.HostsError, match=f"got {n} processes and index {index}"):
        hosts.join("127.0.0.1:80", n, index)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_an_error(offset):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The port before may be in use as well, by another program.
        message = f"Cannot listen on port ({port}|{port - offset}):"
        with pytest.raises(hosts.HostsError, match=message):
            hosts.join(f"127.0.0.1:{port - offset}", 2, 0)


def test_this_machine_has_an_address():
    assert socket.inet_aton(connect._own_address())


def test_an_abort_is_delayed_so_that_the_exit_code_can_be_set():
    program = (
        "import os, threading\n"
        "from tekoa.hosts import connect\n"
        "connect.delay_aborts()\n"
        "threading.Timer(0.2, os._exit, [69]).start()\n"
        "import ctypes\n"
        "ctypes.CDLL(None).abort()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 69


@pytest.mark.slow
def test_an_abort_for_another_reason_is_only_delayed():
    program = (
        "import ctypes\n"
        "from tekoa.hosts import connect\n"
        "connect.delay_aborts()\n"
        "ctypes.CDLL(None).abort()"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False)
    assert result.returncode == -signal.SIGABRT
