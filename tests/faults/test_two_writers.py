"""A12, A13: one writer per directory, and a replaced writer cannot come back."""

import fcntl
import os
import signal
import time

import pytest

from support import processes
from tekoa.store.commit import lease, paths

pytestmark = pytest.mark.slow


def contents(directory):
    return {str(p.relative_to(directory)): p.stat().st_mtime_ns for p in directory.rglob("*")}


def stop_between_changes(process, directory):
    """Stops a writer while it does not hold the lock that guards a change.

    While it holds the lock its lease cannot be broken.
    """
    while True:
        process.send_signal(signal.SIGSTOP)
        while not processes.is_suspended(process.pid):
            time.sleep(0.001)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.003)
        finally:
            os.close(descriptor)


def test_second_trainer_refuses_and_the_first_is_unharmed(launch, figure, tmp_path):
    first = launch("trainer.py", tmp_path, "--steps", 40, "--sleep", 0.05, "--keep", 2)
    assert first.read()["event"] == "start"
    second = launch("trainer.py", tmp_path, "--steps", 100)
    code, facts, _ = second.wait()
    assert code == 73
    assert f"process {first.popen.pid}" in facts[0]["message"]
    first_code, first_facts, errors = first.wait()
    assert (first_code, first_facts[-1]["event"]) == (0, "end")
    assert "failed" not in errors
    figure({"seconds_to_refuse": round(second.seconds, 1)}, exit_code=code, failed_saves_of_first=0)


def test_zombie_writer_can_neither_commit_nor_delete(launch, figure, tmp_path):
    first = launch("trainer.py", tmp_path, "--steps", 100000, "--sleep", 0.005, "--keep", 2)
    for _ in range(6):
        first.read()
    stop_between_changes(first.popen, tmp_path)
    (tmp_path / lease.NAME).unlink()
    second = launch("trainer.py", tmp_path, "--steps", 20, "--keep", 3, "--end", "just_end")
    assert second.wait()[0] == 0
    before = contents(tmp_path)
    assert paths.list_steps(tmp_path) == [18, 19, 20]
    first.popen.send_signal(signal.SIGCONT)
    code, _, _ = first.wait()
    assert code == 73
    assert contents(tmp_path).items() == before.items()
    figure(steps_changed_by_the_zombie=0)


def test_lease_of_a_dead_process_is_taken_over_at_once(launch, figure, tmp_path):
    first = launch("trainer.py", tmp_path, "--steps", 100000)
    first.read()
    first.read()
    first.popen.kill()
    second = launch("trainer.py", tmp_path, "--steps", 3)
    second.read()
    seconds = time.monotonic() - second.started
    second.popen.kill()
    figure({"seconds_to_take_over": round(seconds, 1)})
