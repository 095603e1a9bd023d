import signal
import socket
import subprocess
import sys

import pytest

from tekoa.core import hosts, hosts_start


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:x", "host:99999"])
def test_an_address_that_is_none_is_an_error(address):
    with pytest.raises(hosts.HostsError, match="host:port"):
        hosts.join(address, 2, 1)


@pytest.mark.parametrize(("n", "index"), [(None, 0), (2, None), (2, 2), (2, -1)])
def test_a_group_needs_numbers(n, index):
    with pytest.raises(hosts.HostsError, match="num_processes"):
        hosts.join("127.0.0.1:80", n, index)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_is_an_error(offset):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # The port before may be taken as well, by another program.
        told = f"Port ({port}|{port - offset}) cannot be listened at"
        with pytest.raises(hosts.HostsError, match=told):
            hosts.join(f"127.0.0.1:{port - offset}", 2, 0)


def test_this_machine_has_an_address():
    assert socket.inet_aton(hosts_start._own_address())


def test_an_abort_leaves_time_for_an_exit_code_of_our_own():
    program = (
        "import os, threading\n"
        "from tekoa.core import hosts_start\n"
        "hosts_start.delay_aborts()\n"
        "threading.Timer(0.2, os._exit, [69]).start()\n"
        "import ctypes\n"
        "ctypes.CDLL(None).abort()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 69


@pytest.mark.slow
def test_an_abort_for_another_reason_still_comes():
    program = (
        "import ctypes\n"
        "from tekoa.core import hosts_start\n"
        "hosts_start.delay_aborts()\n"
        "ctypes.CDLL(None).abort()"
    )
    found = subprocess.run([sys.executable, "-c", program], check=False)
    assert found.returncode == -signal.SIGABRT
