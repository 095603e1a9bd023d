"""A5, A26, A27 and a hung process: one process of two is stopped, killed or suspended."""

import os
import pathlib
import random
import re
import signal
import socket
import time

import pytest

from support.processes import TINY_MODEL, TRAIN
from tekoa.store.commit import lease, paths
from tekoa.store.formats.step import open_step

pytestmark = pytest.mark.slow

SLOW = "--module_config.step_seconds=0.1"
EXIT_STOPPED, EXIT_USAGE = 75, 2
# Noticed by Tekoa, or by JAX, which aborts.
LOST = (69, -signal.SIGABRT)


@pytest.fixture(scope="module")
def directory(home):
    """One run that is resumed through everything that happens to it, in any order."""
    return home / "run"


def has_step(directory, step):
    return lambda: step <= max(paths.list_steps(directory), default=-1)


def newest(directory):
    """Returns the newest step, or -1, after checking that all steps are complete."""
    steps = paths.list_steps(directory)
    for step in steps:
        open_step(paths.step_dir(directory, step))
    return max(steps, default=-1)


def shell_code(code):
    return code if code >= 0 else 128 - code


def test_a5_a_signal_to_one_stops_both_at_the_same_step(pair, directory, figure):
    both = pair(*TRAIN, f"--model_dir={directory}", SLOW)
    both[0].wait_until(has_step(directory, 0))
    both[1].popen.send_signal(signal.SIGTERM)
    ends = [process.wait() for process in both]
    assert [code for code, _ in ends] == [EXIT_STOPPED] * 2, both[0].output() + both[1].output()
    stopped = re.search(r"Stopped at step (\d+)", both[0].output())
    assert stopped
    assert newest(directory) == int(stopped[1])
    assert not (directory / lease.NAME).exists()
    seconds = max(seconds for _, seconds in ends)
    figure({"seconds": round(seconds, 1)}, exit_code=EXIT_STOPPED, steps_lost=0)


def test_a26_a_worker_killed_in_a_step_ends_the_other(pair, directory, figure):
    before = newest(directory)
    both = pair(*TRAIN, f"--model_dir={directory}", SLOW, timeout=6)
    both[0].wait_until(has_step(directory, before + 2))
    both[1].popen.kill()
    code, seconds = both[0].wait()
    assert code in LOST, both[0].output()
    assert newest(directory) > before
    figure(
        {"seconds": round(seconds, 1), "exit_code": shell_code(code)},
        partial_commits=0,
        limit_seconds=6,
    )


@pytest.mark.parametrize("point", ["mid_write"])
def test_a26_a_worker_killed_in_a_save_leaves_no_part_of_it(pair, directory, figure, point):
    before = paths.list_steps(directory)
    both = pair(
        *TRAIN,
        f"--model_dir={directory}",
        SLOW,
        env={1: {"TEKOA_FAULT_AT": f"{point}:1:SIGKILL"}},
        timeout=6,
    )
    assert both[1].wait()[0] == -signal.SIGKILL, both[1].output()
    code, seconds = both[0].wait()
    assert code in LOST, both[0].output()
    assert paths.list_steps(directory) == before
    newest(directory)
    figure(
        {"seconds": round(seconds, 1), "exit_code": shell_code(code)},
        partial_commits=0,
        limit_seconds=6,
    )


def test_a_hung_worker_is_given_up(pair, directory, figure):
    before = newest(directory)
    both = pair(*TRAIN, f"--model_dir={directory}", SLOW, timeout=6)
    both[0].wait_until(has_step(directory, before + 2))
    both[1].popen.send_signal(signal.SIGSTOP)
    code, seconds = both[0].wait()
    assert code in LOST, both[0].output()
    both[1].popen.send_signal(signal.SIGCONT)
    assert both[1].wait()[0] in LOST, both[1].output()
    assert newest(directory) > before
    figure(
        {"seconds": round(seconds, 1), "exit_code": shell_code(code)},
        limit_seconds=6,
    )


def test_a27_process_0_killed_ends_the_other(pair, directory, figure):
    before = newest(directory)
    both = pair(*TRAIN, f"--model_dir={directory}", SLOW)
    both[0].wait_until(has_step(directory, before + 2))
    both[0].popen.kill()
    code, seconds = both[1].wait()
    assert code in LOST, both[1].output()
    assert newest(directory) > before
    figure({"seconds": round(seconds, 1), "exit_code": shell_code(code)})


def test_everything_resumed_is_exact(run, pair, alone, directory, assert_close):
    """Resumed with two processes up to step 35, then with one to the end."""
    both = pair(*TRAIN, f"--model_dir={directory}", "--max_train_steps=35")
    assert [process.wait()[0] for process in both] == [0, 0], both[0].output() + both[1].output()
    output = run(*TRAIN, f"--model_dir={directory}")
    assert "Saved on data=4 (4 devices) of 2 processes, now running on 1 device." in output
    assert newest(directory) == 40
    assert_close(directory, alone, 40)


def test_a_run_killed_on_2_1_3_and_2_processes_is_exact(together, alone, home, assert_close):
    directory = home / "elastic"
    flags = [*TRAIN, f"--model_dir={directory}", "--valid_batch_size=12"]
    for n, victim in ((2, 0), (1, 0), (3, 2)):
        before = newest(directory)
        group = together(n, *flags, SLOW, timeout=6)
        group[0].wait_until(has_step(directory, before + 2))
        group[victim].popen.kill()
        codes = [process.wait()[0] for process in group]
        assert codes.pop(victim) == -signal.SIGKILL
        assert all(code in LOST for code in codes), group[0].output()
    group = together(2, *flags)
    assert [process.wait()[0] for process in group] == [0, 0], group[0].output()
    line = "Saved on data=3 (3 devices) of 3 processes, now running on data=2 (2 devices) of 2"
    assert line in group[0].output()
    assert_close(directory, alone, 40)


def test_launch_restarts_after_kills_and_ends_exactly(start, alone, home, assert_close):
    directory = home / "restarted"
    two = ["launch", "--processes=2", "--devices=2", "--grace=1", "--max_restarts=3"]
    launcher = start(*two, *TRAIN, f"--model_dir={directory}", SLOW)
    dice = random.Random(19)
    for n in range(3):
        launcher.wait_until(has_step(directory, 10 * n))
        time.sleep(dice.uniform(0, 1))
        os.kill(dice.choice(children(launcher.popen.pid)), signal.SIGKILL)
        launcher.wait_until(
            lambda n=n: launcher.output().count("tekoa launch: restarting") == n + 1
        )
    assert launcher.wait()[0] == 0, launcher.output()
    assert launcher.output().count("failed first, with code 137") == 3
    assert_close(directory, alone, 40)


def children(pid):
    """Returns the processes that a process started, in order."""
    return [int(x) for x in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_second_process_with_the_same_index_is_refused_and_harms_nobody(pair, start, home):
    flags = [*TRAIN, f"--model_dir={home / 'twice'}", "--module_config.step_seconds=1"]
    both = pair(*flags)
    both[0].wait_until(has_step(home / "twice", 0))
    address = next(word for word in both[1].popen.args if "coordinator_address" in word)
    third = start(*flags, address, "--num_processes=2", "--process_id=1")
    assert third.wait()[0] == EXIT_USAGE, third.output()
    assert "already is a process 1" in third.output()
    both[0].popen.send_signal(signal.SIGTERM)
    assert [process.wait()[0] for process in both] == [EXIT_STOPPED] * 2


def test_a_port_in_use_is_reported(run, directory):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = run(
            *["eval", TINY_MODEL, f"--model_dir={directory}", "--num_processes=2"],
            *["--process_id=0", f"--coordinator_address=127.0.0.1:{port}"],
            code=EXIT_USAGE,
        )
    assert f"Cannot listen on port {port}: Address already in use" in output


def test_processes_with_different_flags_are_reported(pair, directory):
    both = pair(
        *["eval", TINY_MODEL, f"--model_dir={directory}"], extra={1: ["--eval_batch_size=8"]}
    )
    assert [process.wait()[0] for process in both] == [EXIT_USAGE] * 2
    line = "process 0 has {'eval_batch_size': '256'}, process 1 has {'eval_batch_size': '8'}"
    assert line in both[0].output()
