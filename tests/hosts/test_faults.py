"""A5, A26, A27 and a stuck peer: one process of two is stopped, killed or halted."""

import pathlib
import re
import signal
import socket

import pytest

from tekoa.store import lease, names, steps

pytestmark = pytest.mark.slow

TINY = pathlib.Path(__file__).parent / "programs" / "tiny.py"
SLOW = "--module_config.step_seconds=0.1"
EXIT_STOPPED, EXIT_PEER_LOST, EXIT_USAGE = 75, 69, 2


@pytest.fixture(scope="module")
def directory(home):
    """One run, that goes on through all that happens to it, in any order."""
    return home / "run"


def has_step(directory, step):
    return lambda: step <= max(names.list_steps(directory), default=-1)


def newest(directory):
    """The newest step, -1 if there is none; all that are there are whole."""
    found = names.list_steps(directory)
    for step in found:
        steps.open_step(names.step_dir(directory, step))
    return max(found, default=-1)


def test_a5_a_signal_to_one_stops_both_at_the_same_step(pair, directory, figure):
    both = pair("train", TINY, f"--model_dir={directory}", SLOW)
    both[0].wait_for(has_step(directory, 0))
    both[1].popen.send_signal(signal.SIGTERM)
    ends = [process.end() for process in both]
    assert [code for code, _ in ends] == [EXIT_STOPPED] * 2, both[0].said() + both[1].said()
    stopped = re.search(r"Stopped at step (\d+)", both[0].said())
    assert stopped
    assert newest(directory) == int(stopped[1])
    assert not (directory / lease.NAME).exists()
    figure(steps_lost=0, seconds=round(max(seconds for _, seconds in ends), 1))


def test_a26_a_worker_killed_in_a_step_ends_the_other(pair, directory, figure):
    before = newest(directory)
    both = pair("train", TINY, f"--model_dir={directory}", SLOW)
    both[0].wait_for(has_step(directory, before + 2))
    both[1].popen.kill()
    code, seconds = both[0].end()
    assert code == EXIT_PEER_LOST, both[0].said()
    assert f"process 1 (number {both[1].popen.pid} on {socket.gethostname()}) is gone" in (
        both[0].said()
    )
    assert newest(directory) > before
    figure(seconds=round(seconds, 1), partial=0)


@pytest.mark.parametrize("point", ["mid_write"])
def test_a26_a_worker_killed_in_a_save_leaves_no_part_of_it(pair, directory, figure, point):
    before = names.list_steps(directory)
    both = pair(
        "train",
        TINY,
        f"--model_dir={directory}",
        SLOW,
        env=({}, {"TEKOA_FAULT_AT": f"{point}:1:SIGKILL"}),
    )
    assert both[1].end()[0] == -signal.SIGKILL, both[1].said()
    code, seconds = both[0].end()
    assert code == EXIT_PEER_LOST, both[0].said()
    assert names.list_steps(directory) == before
    newest(directory)
    figure(seconds=round(seconds, 1), partial=0)


def test_a_stuck_worker_is_named_and_given_up(pair, directory, figure):
    before = newest(directory)
    both = pair("train", TINY, f"--model_dir={directory}", SLOW, timeout=6)
    both[0].wait_for(has_step(directory, before + 2))
    both[1].popen.send_signal(signal.SIGSTOP)
    code, seconds = both[0].end()
    assert code == EXIT_PEER_LOST, both[0].said()
    assert f"process 1 (number {both[1].popen.pid}" in both[0].said()
    assert "is stuck: no sign of life for 6 s" in both[0].said()
    both[1].popen.send_signal(signal.SIGCONT)
    assert both[1].end()[0] == EXIT_PEER_LOST, both[1].said()
    assert newest(directory) > before
    figure(seconds=round(seconds, 1), limit=6)


def test_a27_process_0_killed_ends_the_other(pair, directory, figure):
    before = newest(directory)
    both = pair("train", TINY, f"--model_dir={directory}", SLOW)
    both[0].wait_for(has_step(directory, before + 2))
    both[0].popen.kill()
    code, seconds = both[1].end()
    assert code == EXIT_PEER_LOST, both[1].said()
    assert f"process 0 (number {both[0].popen.pid}" in both[1].said()
    assert newest(directory) > before
    figure(seconds=round(seconds, 1))


def test_all_that_goes_on_is_exact(run, pair, alone, directory, assert_close):
    """With two processes to step 35, with one to the end."""
    both = pair("train", TINY, f"--model_dir={directory}", "--max_train_steps=35")
    assert [process.end()[0] for process in both] == [0, 0], both[0].said() + both[1].said()
    said = run("train", TINY, f"--model_dir={directory}")
    assert "saved on data=4 (4 devices) of 2 processes and goes on on 1 device." in said
    assert newest(directory) == 40
    assert_close(directory, alone, 40)


def test_one_process_goes_on_as_two(run, pair, alone, home, assert_close):
    flags = ["train", TINY, f"--model_dir={home / 'grows'}"]
    run(*flags, "--max_train_steps=17")
    both = pair(*flags)
    assert [process.end()[0] for process in both] == [0, 0], both[0].said() + both[1].said()
    told = "saved on 1 device and goes on on data=4 (4 devices) of 2 processes."
    assert told in both[0].said()
    assert_close(home / "grows", alone, 40)


def test_a_second_process_of_one_number_is_refused_and_harms_nobody(pair, start, home):
    flags = ["train", TINY, f"--model_dir={home / 'twice'}", "--module_config.step_seconds=1"]
    both = pair(*flags)
    both[0].wait_for(has_step(home / "twice", 0))
    address = next(word for word in both[1].popen.args if "coordinator_address" in word)
    third = start(*flags, address, "--num_processes=2", "--process_id=1")
    assert third.end()[0] == EXIT_USAGE, third.said()
    assert f"there is a process 1 (number {both[1].popen.pid}" in third.said()
    both[0].popen.send_signal(signal.SIGTERM)
    assert [process.end()[0] for process in both] == [EXIT_STOPPED] * 2


def test_a_port_that_is_taken_is_told(run, directory):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = run(
            *["eval", TINY, f"--model_dir={directory}", "--num_processes=2", "--process_id=0"],
            f"--coordinator_address=127.0.0.1:{port}",
            code=EXIT_USAGE,
        )
    assert f"Port {port} cannot be listened at: Address already in use" in said


def test_processes_with_other_flags_are_told(pair, directory):
    both = pair(*["eval", TINY, f"--model_dir={directory}"], extra=((), ("--eval_batch_size=8",)))
    assert [process.end()[0] for process in both] == [EXIT_USAGE] * 2
    told = "process 0 has {'eval_batch_size': '256'}, process 1 has {'eval_batch_size': '8'}"
    assert told in both[0].said()
