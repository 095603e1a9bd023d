"""The launcher with small programs instead of training; tests/hosts has real runs."""

import signal
import socket
import sys
import threading
import time

import pytest

from tekoa.estimator.cli import launch
from tekoa.estimator.cli.flags import UsageError


def group(*programs):
    return launch.Group([[sys.executable, "-c", program] for program in programs], env={})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "mnist"], "launch needs the number of processes"),
        (["--processes=2"], "launch needs a command"),
        (["--processes=two", "train"], "must be an integer"),
        (["--processes=0", "train"], "must be an integer"),
        (["--processes=100000", "train"], "from 1 to 64, got '100000'"),
        (["--processes=1", "--devices=99999", "train"], "from 1 to 256"),
        (["--processes=\u00b2", "train"], "must be an integer"),
        (["--processes=" + "9" * 5000, "train"], "must be an integer"),
        (["--process=2", "train"], "launch needs the number of processes"),
        (["--processes=2", "inspect", "runs"], "got 'inspect'"),
    ],
)
def test_invalid_launch_flags_are_usage_errors(words, message):
    with pytest.raises(UsageError, match=message):
        launch.parse(words)


def test_flags_after_the_command_belong_to_the_command():
    options, command = launch.parse(["--devices=4", "--processes=2", "train", "x", "--devices=1"])
    assert (options.processes, options.devices) == (2, 4)
    assert command == ["train", "x", "--devices=1"]


def test_flags_without_a_command_can_be_launched():
    _, command = launch.parse(["--processes=2", "--module_imp=mnist", "--train_pattern=x"])
    assert command == ["--module_imp=mnist", "--train_pattern=x"]


def test_free_port_returns_two_consecutive_free_ports():
    port = launch.free_port()
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", port))
        second.bind(("", port + 1))


def test_lines_are_prefixed_except_the_output_of_process_0(capfd):
    greeting = "[Gloo] Rank 0 is connected to 3 peer ranks."
    program = f"import sys; print('result'); print('log', file=sys.stderr); print('{greeting}')"
    assert group(program, program).wait(grace_seconds=60) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[1] result", "result"]
    assert sorted(err.splitlines()) == ["[0] log", "[1] log"]


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((75, 75), 75), ((69, 3), 3), ((69, 69), 69), ((0, 7), 7)]
)
def test_exit_code_is_that_of_the_process_with_its_own_reason(codes, code):
    programs = [f"raise SystemExit({c})" for c in codes]
    assert group(*programs).wait(grace_seconds=60) == code


def test_exit_code_of_a_killed_process_follows_the_shell():
    killed = "import os; os.kill(os.getpid(), 9)"
    assert group(killed, "raise SystemExit(69)").wait(grace_seconds=60) == 128 + 9


def test_process_that_outlives_a_failure_is_killed():
    started = time.monotonic()
    assert group("import time; time.sleep(600)", "raise SystemExit(4)").wait(grace_seconds=0.2) == 4
    assert time.monotonic() - started < 300


def test_signals_reach_all_processes(capfd):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    processes = group(program, program)
    output = ""
    while output.count("ready") < 2:
        output += capfd.readouterr().out
        time.sleep(0.01)
    threading.Timer(0.1, processes.send, [signal.SIGTERM]).start()
    assert processes.wait(grace_seconds=60) == 75
