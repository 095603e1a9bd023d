"""Slow, stuck and failing disks: reported, bounded, and never blamed on someone else."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess

import pytest

from support import processes
from tekoa import store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc"),
]
SHIM = pathlib.Path(__file__).parent / "programs" / "disk_shim.c"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    return library


@pytest.fixture
def disk(shim, tmp_path):
    """The environment of a process for which `tmp_path / 'run'` is on a bad disk."""
    return {"LD_PRELOAD": str(shim), "TEKOA_DISK": str(tmp_path / "run")}


def run(launch, disk, *args):
    program = launch("slow_disk.py", disk["TEKOA_DISK"], *args, env=disk)
    code, (facts,), errors = program.wait()
    assert code == 0, errors
    return facts


def test_saves_on_a_slow_disk_succeed_and_say_that_they_wait(launch, disk, figure):
    facts = run(launch, disk, "slow", "wait")
    assert facts.get("error") is None
    assert facts["steps"] == [1, 2, 3]
    assert len(facts["lines"]) == 2
    assert "saving step 2 waits for" in facts["lines"][0]
    figure(saves=3, failed_saves=0, late_saves=facts["late"])


def test_saves_on_a_slow_disk_are_skipped_if_requested_but_not_the_last(launch, disk):
    facts = run(launch, disk, "slow", "skip")
    assert (facts["steps"], facts["late"]) == ([1, 3], 2)
    assert "saving step 2 was skipped" in facts["lines"][0]


@pytest.mark.parametrize("name", ["EIO", "ENOSPC"])
def test_failed_write_is_reported_with_its_reason_and_survived(launch, disk, figure, name):
    number = getattr(errno, name)
    facts = run(launch, disk, "fail", number)
    assert (facts["steps"], facts["left"]) == ([1, 3], [])
    (line,) = facts["lines"]
    assert "saving step 2 failed" in line
    assert os.strerror(number) in line
    assert "process" not in line
    figure(steps_lost=0, left_behind=0)


def test_first_signal_ends_a_run_whose_disk_is_stuck(disk, figure, tmp_path):
    model_dir = tmp_path / "run"
    words = ["train", processes.TINY_MODEL, "--max_train_steps=100000", "--check_every_steps=20"]
    words += [f"--model_dir={model_dir}", "--grace_seconds=2", "--max_ckpt=2"]
    command = processes.Command(words, tmp_path / "log", **disk)
    try:
        command.wait_until(lambda: len(list(model_dir.glob("checkpoint_*0"))) >= 2)
        (tmp_path / "run.stuck").touch()
        command.wait_until(lambda: "waits for" in command.output())
        command.send(signal.SIGTERM)
        code, seconds = command.wait()
    finally:
        command.close()
        (tmp_path / "run.stuck").unlink()
    assert code == 74, command.output()
    assert "did not end within 2 seconds" in command.output()
    assert "Traceback" not in command.output()
    figure({"seconds_to_exit": round(seconds, 1)}, exit_code=code, grace_seconds=2)
    assert store.load(model_dir)["step"] % 20 == 0
    words[2] = "--max_train_steps=20"
    again = processes.Command(words, tmp_path / "again")
    assert again.wait()[0] == 0, again.output()
