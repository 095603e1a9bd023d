"""Stop signals: a flag first, the end second, everything back afterwards."""

import os
import signal
import subprocess
import sys
import threading
import timeit

import pytest

from tekoa.store import signals


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_signal_sets_the_flag_only(number):
    before = signal.getsignal(number)
    with signals.stop_flag() as flag:
        assert not flag.is_set()
        os.kill(os.getpid(), number)
        assert flag.is_set()
        assert flag.signal == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "Stopping"), (signal.SIGTERM, "")])
def test_only_a_person_is_told(number, said, capfd):
    with signals.stop_flag():
        os.kill(os.getpid(), number)
    err = capfd.readouterr().err
    assert err.strip().startswith(said)
    assert bool(err) == bool(said)


def test_second_signal_ends_at_once():
    code = (
        "import os, signal, tekoa.store.signals as s\n"
        "with s.stop_flag():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('never')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "still here\n")


def test_other_threads_get_a_flag_that_stays_down():
    seen = []

    def work():
        with signals.stop_flag() as flag:
            seen.append(flag.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_flag_is_cheap_to_read():
    with signals.stop_flag() as flag:
        assert min(timeit.repeat(flag.is_set, number=1000, repeat=3)) / 1000 < 2e-6


def test_exit_code_is_documented():
    assert signals.EXIT_STOPPED == 75
