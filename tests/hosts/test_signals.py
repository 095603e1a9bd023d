import os
import signal
import subprocess
import sys
import threading

import pytest

from support.processes import python
from tekoa.hosts import signals


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_only_sets_the_flag(number):
    previous = signal.getsignal(number)
    with signals.stop_flag() as flag:
        assert not flag.is_set()
        os.kill(os.getpid(), number)
        assert flag.is_set()
        assert flag.signal == number
    assert signal.getsignal(number) == previous


@pytest.mark.parametrize(("number", "text"), [(signal.SIGINT, "Stopping"), (signal.SIGTERM, "")])
def test_only_sigint_prints_a_message(number, text, capfd):
    with signals.stop_flag():
        os.kill(os.getpid(), number)
    err = capfd.readouterr().err
    assert err.strip().startswith(text)
    assert bool(err) == bool(text)


def test_a_second_signal_exits_immediately():
    code = (
        "import os, signal, tekoa.hosts.signals as s\n"
        "with s.stop_flag():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('never')\n"
    )
    result = python("-c", code)
    assert (result.returncode, result.stdout) == (128 + signal.SIGINT, "still here\n")


def test_hangup_stays_ignored_under_nohup():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stop_flag() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not flag.is_set()
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_output_to_a_closed_terminal_is_no_error():
    """The program is the leader of a session whose terminal goes away."""
    code = (
        "import fcntl, os, sys, termios, time, tekoa.hosts.signals as s\n"
        "os.setsid(); fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
        "with s.stop_flag() as flag:\n"
        "    print('ready', flush=True)\n"
        "    while not flag.is_set(): time.sleep(0.01)\n"
        "print('stopped', flush=True)\n"
        "sys.exit(75)\n"
    )
    terminal, program = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=program, stderr=program)
    os.close(program)
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert process.wait(120) == 75


def test_in_other_threads_the_flag_is_never_set():
    values = []

    def work():
        with signals.stop_flag() as flag:
            values.append(flag.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert values == [False]


def test_the_exit_code_is_ex_tempfail():
    assert signals.EXIT_STOPPED == 75
