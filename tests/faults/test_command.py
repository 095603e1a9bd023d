"""A4, A17, A18, A24, A25: the command under signals, kills and bad numbers."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import store
from tekoa.store import names
from tekoa.testing import assert_trees_equal

TINY = pathlib.Path(__file__).parent / "programs" / "tiny.py"
LIMIT_SECONDS = 120
pytestmark = pytest.mark.slow


class Command:
    """One call of `tekoa` as a process."""

    def __init__(self, directory, programs, words):
        self._out = (directory.parent / f"{time.monotonic_ns()}.out").open("w+")
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tekoa", words[0], TINY, f"--model_dir={directory}", *words[1:]],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **cache},
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, condition):
        """Waits until something is so; fails if the process ends first."""
        until = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self._popen.poll() is None, self.said()
            assert time.monotonic() < until, f"hang: {self.said()}"
            time.sleep(0.002)

    def send(self, number):
        self._popen.send_signal(number)

    def end(self):
        """Gives the exit code and the seconds it took."""
        started = time.monotonic()
        code = self._popen.wait(timeout=LIMIT_SECONDS)
        return code, time.monotonic() - started

    def said(self):
        self._out.flush()
        return pathlib.Path(self._out.name).read_text()

    def close(self):
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        self._out.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def tekoa(tmp_path, programs):
    """`tekoa("train", flags..., directory="run")` starts the command on the tiny model."""
    started = []

    def start(*words, directory="run"):
        started.append(Command(tmp_path / directory, programs, words))
        return started[-1]

    yield start
    for command in started:
        command.close()


def newest(directory):
    return max(names.list_steps(directory), default=-1)


def points(directory, tag):
    events = event_accumulator.EventAccumulator(str(directory), {"scalars": 0})
    events.Reload()
    return [point.step for point in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, programs):
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    command = Command(directory, programs, ["train"])
    assert command.end()[0] == 0, command.said()
    command.close()
    return directory


def assert_same_end(directory, undisturbed):
    assert_trees_equal(store.load(directory), store.load(undisturbed))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_saves_and_the_rest_is_exact(tekoa, undisturbed, figure, tmp_path, number):
    run = tmp_path / "run"
    command = tekoa("train", "--module_config.step_seconds=0.02")
    command.wait_for(lambda: newest(run) >= 10)
    time.sleep(random.Random(int(number)).uniform(0, 0.4))
    command.send(number)
    code, seconds = command.end()
    stopped_at = newest(run)
    assert code == 75, command.said()
    assert f"Stopped at step {stopped_at};" in command.said()
    command = tekoa("train")
    assert command.end()[0] == 0, command.said()
    assert f"Goes on from step {stopped_at}." in command.said()
    assert_same_end(run, undisturbed)
    figure(stopped_at=stopped_at, steps_lost=0, seconds_to_exit=round(seconds, 2))
    assert seconds < 30


def test_tensorboard_after_three_kills_has_every_point_once(tekoa, undisturbed, figure, tmp_path):
    run, chance = tmp_path / "run", random.Random(3)
    n_lost, restarts = 0, []
    for i in range(3):
        command = tekoa("train", "--module_config.step_seconds=0.02")
        until = 15 * (i + 1)
        command.wait_for(lambda until=until: newest(run) >= until)
        time.sleep(chance.uniform(0, 0.1))
        command.send(signal.SIGKILL)
        command.end()
        restarts.append(newest(run))
        n_lost += len(set(range(5, restarts[-1] + 1, 5)) - set(points(run / "train", "train/loss")))
    command = tekoa("train")
    assert command.end()[0] == 0, command.said()
    expected = list(range(5, 61, 5))
    seen = points(run / "train", "train/loss")
    missing, twice = len(set(expected) - set(seen)), len(seen) - len(set(seen))
    figure(restarted_from=restarts, lost_before_last_commit=n_lost, missing=missing, twice=twice)
    assert n_lost == 0
    assert seen == expected
    assert_same_end(run, undisturbed)
    assert not [p for p in run.iterdir() if "tmp" in p.name or "trash" in p.name]


def test_a_killed_evaluator_misses_nothing_and_tells_nothing_twice(
    tekoa, undisturbed, figure, tmp_path
):
    run, chance = undisturbed, random.Random(4)
    note = run / "eval" / "last_evaluated_ckpt"
    flags = ["--eval_pattern=eval", "--save_high=accuracy"]
    for after in (10, 25, 40):
        command = tekoa("eval_wait", *flags, "--module_config.eval_seconds=0.002", directory=run)
        command.wait_for(
            lambda after=after: note.exists() and int(note.read_text().split("_")[-1]) >= after
        )
        time.sleep(chance.uniform(0, 0.2))
        command.send(signal.SIGKILL)
        command.end()
    command = tekoa("eval_wait", *flags, directory=run)
    assert command.end()[0] == 0, command.said()
    expected = list(range(0, 61, 5))
    seen = points(run / "eval", "eval/accuracy")
    missing, twice = len(set(expected) - set(seen)), len(seen) - len(set(seen))
    figure(kills=3, missing=missing, twice=twice)
    assert seen == expected
    assert len(names.list_steps(run / "eval" / "high_accuracy")) >= 1
    assert not list((run / "eval").glob("*pin*"))


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_bad_numbers_never_reach_the_disk(tekoa, figure, tmp_path, action):
    run = tmp_path / "run"
    command = tekoa("train", "--module_config.poison=77", f"--on_nan={action}")
    code, _ = command.end()
    assert code == {"stop": 76, "skip": 0}[action], command.said()
    bad = 0
    for step in names.list_steps(run):
        leaves = store.load(run, step=step)["model_params"]["Dense_0"].values()
        bad += not all(np.isfinite(leaf).all() for leaf in leaves)
    assert bad == 0
    if action == "skip":
        figure(nan_params_on_disk=bad, steps_done=newest(run))
        # What was skipped before is no reason for a run that stops to stop at once.
        command = tekoa("train", "--max_train_steps=65", "--on_nan=stop")
        assert command.end()[0] == 0, command.said()
        return
    said = command.said()
    first_bad = int(said.split("At step ")[1].split()[0])
    figure(nan_params_on_disk=bad, first_bad_step=first_bad, saved=newest(run))
    assert newest(run) == first_bad - 1
    assert "Traceback" not in said
    # With good data the run goes on from the last good step.
    command = tekoa("train")
    assert command.end()[0] == 0, command.said()
    assert f"Goes on from step {first_bad - 1}." in command.said()


def test_a_changed_seed_is_refused_unless_it_is_allowed(tekoa, undisturbed):
    flags = ["train", "--random_seed=5", "--max_train_steps=70"]
    facts = (undisturbed / "run.json").read_text()
    command = tekoa(*flags, directory=undisturbed)
    assert command.end()[0] == 2
    assert "seed was 4, is 5" in command.said()
    assert (undisturbed / "run.json").read_text() == facts
    command = tekoa(*flags, "--allow_data_changes", directory=undisturbed)
    assert command.end()[0] == 0, command.said()
    assert newest(undisturbed) == 70
