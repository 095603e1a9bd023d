"""The launcher with small programs in place of training; tests/hosts has the real ones."""

import signal
import socket
import sys
import threading
import time

import pytest

from tekoa.estimator import launch
from tekoa.estimator.config import UsageError


def group(*programs):
    return launch.Group([[sys.executable, "-c", program] for program in programs], env={})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "mnist"], "How many processes"),
        (["--processes=2"], "Which command"),
        (["--processes=two", "train"], "must be a number"),
        (["--processes=0", "train"], "must be a number"),
        (["--process=2", "train"], "How many processes"),
        (["--processes=2", "inspect", "runs"], "not 'inspect'"),
    ],
)
def test_mistakes_before_the_command_are_told(words, told):
    with pytest.raises(UsageError, match=told):
        launch.parse(words)


def test_flags_after_the_command_are_not_the_launchers():
    options, command = launch.parse(["--devices=4", "--processes=2", "train", "x", "--devices=1"])
    assert (options.processes, options.devices) == (2, 4)
    assert command == ["train", "x", "--devices=1"]


def test_the_original_form_can_be_launched():
    _, command = launch.parse(["--processes=2", "--module_imp=mnist", "--train_pattern=x"])
    assert command == ["--module_imp=mnist", "--train_pattern=x"]


def test_two_free_ports_in_a_row():
    port = launch.free_port()
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", port))
        second.bind(("", port + 1))


def test_lines_tell_their_process_but_results_pass_as_they_are(capfd):
    greeting = "[Gloo] Rank 0 is connected to 3 peer ranks."
    program = f"import sys; print('result'); print('log', file=sys.stderr); print('{greeting}')"
    assert group(program, program).wait(grace_seconds=60) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[1] result", "result"]
    assert sorted(err.splitlines()) == ["[0] log", "[1] log"]


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((75, 75), 75), ((69, 3), 3), ((69, 69), 69), ((0, 7), 7)]
)
def test_the_code_is_that_of_the_one_with_a_reason_of_its_own(codes, code):
    programs = [f"raise SystemExit({c})" for c in codes]
    assert group(*programs).wait(grace_seconds=60) == code


def test_a_killed_process_counts_as_shells_count_it():
    killed = "import os; os.kill(os.getpid(), 9)"
    assert group(killed, "raise SystemExit(69)").wait(grace_seconds=60) == 128 + 9


def test_a_process_that_does_not_end_after_a_failure_is_ended():
    started = time.monotonic()
    assert group("import time; time.sleep(600)", "raise SystemExit(4)").wait(grace_seconds=0.2) == 4
    assert time.monotonic() - started < 300


def test_signals_reach_all(capfd):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    both = group(program, program)
    said = ""
    while said.count("ready") < 2:
        said += capfd.readouterr().out
        time.sleep(0.01)
    threading.Timer(0.1, both.send, [signal.SIGTERM]).start()
    assert both.wait(grace_seconds=60) == 75
