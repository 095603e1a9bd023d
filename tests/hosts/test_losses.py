"""A process of three is killed, suspended or fails, wherever the others are.

By default some of the cases run; with `TEKOA_ALL_LOSSES=FILE` all of them, and 30 kills of process
0. How each ended is then added to the file.
"""

import itertools
import json
import os
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from support.processes import TINY_MODEL, TRAIN, is_suspended
from tekoa import store
from tekoa.store.commit import paths
from tekoa.store.formats.step import open_step

pytestmark = pytest.mark.slow

# Exit codes that mean "start again": noticed by Tekoa, or by JAX, which aborts.
LOST = (69, -signal.SIGABRT)
UNEXPECTED = 1
LIMIT_SECONDS = 15
# A process that receives SIGUSR2 raises an error.
FAULTS = ("SIGKILL", "SIGSTOP", "SIGUSR2")
PHASES = ("step", "save", "restore", "idle")
SOME = [(0, "SIGUSR2", "save"), (2, "SIGSTOP", "restore"), (1, "SIGKILL", "idle")]
ALL = [*itertools.product(range(3), FAULTS, PHASES), *[(0, "SIGKILL", "step")] * 30]
RESULTS = os.environ.get("TEKOA_ALL_LOSSES")
POINTS = {"save": "mid_write:1", "restore": "mid_read:1"}
SLOW = "--module_config.step_seconds=0.1"
LAST = 450 if RESULTS else 100
# Batches that three processes can divide.
SIZES = ["--valid_batch_size=15", "--eval_batch_size=15"]


@pytest.fixture(scope="module")
def undisturbed(together, home):
    """A run of three processes."""
    processes = together(
        3, *TRAIN, *SIZES[:1], f"--max_train_steps={LAST}", f"--model_dir={home / 'undisturbed'}"
    )
    assert [process.wait()[0] for process in processes] == [0, 0, 0], processes[0].output()
    return home / "undisturbed"


@pytest.fixture(scope="module")
def directory(undisturbed, home):
    """A run that is resumed through everything that happens to it, from step 5 of the other."""
    start = paths.step_dir(undisturbed, 5)
    shutil.copytree(start, home / "disturbed" / start.name)
    return home / "disturbed"


@pytest.mark.parametrize(("victim", "fault", "phase"), ALL if RESULTS else SOME)
def test_a_loss_ends_all_and_commits_nothing_partial(together, directory, victim, fault, phase):
    before = paths.list_steps(directory)
    words = [*TRAIN, *SIZES[:1], SLOW]
    if phase == "idle":
        words = ["eval_wait", TINY_MODEL, *SIZES[1:], f"--eval_label=label_{victim}_{fault}"]
    env = {victim: {"TEKOA_FAULT_AT": f"{POINTS[phase]}:{fault}"}} if phase in POINTS else {}
    flags = [f"--model_dir={directory}", f"--max_train_steps={LAST}"]
    processes = together(3, *words, *flags, env=env, timeout=LIMIT_SECONDS)
    lost, others = processes[victim], [p for p in processes if p is not processes[victim]]
    if phase not in POINTS:
        processes[0].wait_until(
            (lambda: "Waiting for the next" in processes[0].output())
            if phase == "idle"
            else (lambda: max(paths.list_steps(directory)) > max(before))
        )
        lost.send(signal.Signals[fault])
    wait_for_fault(lost, fault)
    start = time.monotonic()
    codes = [process.wait()[0] for process in others]
    seconds = time.monotonic() - start
    if fault == "SIGSTOP":
        lost.send(signal.SIGCONT)
    own_code = lost.wait()[0]
    outputs = "\n".join(process.output() for process in processes)
    if RESULTS:
        with open(RESULTS, "a") as file:
            row = [victim, fault, phase, round(seconds, 1), own_code, codes]
            print(json.dumps(row), file=file)
    assert all(code in LOST for code in codes), outputs
    expected = {"SIGKILL": (-signal.SIGKILL,), "SIGSTOP": LOST, "SIGUSR2": (UNEXPECTED,)}
    assert own_code in expected[fault], outputs
    assert seconds < LIMIT_SECONDS + 10, outputs
    steps = paths.list_steps(directory)
    for step in steps:
        open_step(paths.step_dir(directory, step))
    assert set(before) <= set(steps)
    # A process that fails may have written its part before; then the step is complete.
    if phase != "step" and fault != "SIGUSR2":
        assert steps == before


def wait_for_fault(process, fault):
    """Waits until a process ended or is suspended."""
    deadline = time.monotonic() + 170
    while process.popen.poll() is None:
        if fault == "SIGSTOP" and is_suspended(process.popen.pid):
            return
        assert time.monotonic() < deadline, f"hang: {process.output()}"
        time.sleep(0.01)


def test_resumed_together_it_ends_as_the_undisturbed_run(together, directory, undisturbed):
    processes = together(
        3, *TRAIN, *SIZES[:1], f"--max_train_steps={LAST}", f"--model_dir={directory}"
    )
    assert [process.wait()[0] for process in processes] == [0, 0, 0], processes[0].output()
    items = ["model_params", "optimizer_state"]
    a, b = (store.load(path, step=LAST, items=items) for path in (directory, undisturbed))
    jax.tree.map(
        np.testing.assert_array_equal,
        {item: a[item] for item in items},
        {item: b[item] for item in items},
    )
