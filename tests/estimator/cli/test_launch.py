"""The launcher with small programs instead of training; tests/hosts has real runs."""

import pathlib
import signal
import socket
import subprocess
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
        (["--processes=1", "--max_restarts=-1", "train"], "must be an integer from 0"),
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


def test_free_port_returns_a_free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", launch.free_port()))


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


def test_exit_code_of_a_killed_process_follows_the_shell(capfd):
    killed = "import os; os.kill(os.getpid(), 9)"
    assert group("raise SystemExit(69)", killed).wait(grace_seconds=60) == 128 + 9
    assert "process 1 failed first, with code 137" in capfd.readouterr().err


def test_abort_by_jax_counts_as_a_lost_process():
    assert group("import os; os.abort()", "raise SystemExit(3)").wait(grace_seconds=60) == 3
    assert group("import os; os.abort()", "import os; os.abort()").wait(grace_seconds=60) == 69


@pytest.fixture
def starts(monkeypatch):
    """Replaces the command: `starts.codes` are the exit codes of the group, start by start."""

    class Starts:
        codes, n = (), 0

        def start(self, options, command):
            code = self.codes[self.n]
            self.n += 1
            return group(f"raise SystemExit({code})", f"raise SystemExit({code and 69})")

    starts = Starts()
    monkeypatch.setattr(launch, "_start", starts.start)
    return starts


@pytest.mark.parametrize(
    ("codes", "n_starts"),
    [((69, 75, 0), 3), ((137, 69, 69, 0), 3), ((2, 0), 1), ((74, 0), 1), ((0, 0), 1)],
    ids=["lost and stopped", "at most two restarts", "usage", "disk", "success"],
)
def test_a_lost_process_restarts_all(starts, codes, n_starts):
    starts.codes = codes
    code = launch.launch(["--processes=2", "--max_restarts=2", "train", "mnist"])
    assert (starts.n, code) == (n_starts, codes[n_starts - 1])


def test_without_max_restarts_nothing_is_restarted(starts):
    starts.codes = (69, 0)
    assert launch.launch(["--processes=2", "train", "mnist"]) == 69
    assert starts.n == 1


LAUNCHER = """
import sys, time
from tekoa.estimator.cli import launch
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
launch._start = lambda *_: launch.Group([[sys.executable, "-c", child]], env={})
sys.exit(launch.launch(["--processes=1", "--max_restarts=5", "train", "x"]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_processes_do_not_outlive_the_launcher(number):
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        launcher.send_signal(number)
        code = launcher.wait(60)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "hang: the process outlives the launcher"
        time.sleep(0.01)


def is_running(pid):
    try:
        return " Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_process_that_outlives_a_failure_is_killed():
    started = time.monotonic()
    assert group("import time; time.sleep(600)", "raise SystemExit(4)").wait(grace_seconds=0.2) == 4
    assert time.monotonic() - started < 300


def test_processes_that_outlive_a_killed_one_are_killed_soon():
    started = time.monotonic()
    killed = "import os; os.kill(os.getpid(), 9)"
    assert group("import time; time.sleep(600)", killed).wait(grace_seconds=500) == 128 + 9
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
