"""A4, A17, A18, A24, A25: the command under signals, kills, NaN and Inf."""

import random
import signal
import time

import jax
import numpy as np
import pytest

from support import events, processes
from tekoa import store
from tekoa.store.commit import paths
from tekoa.testing import assert_trees_equal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One compile cache for all commands of this module."""
    return processes.compile_cache(tmp_path_factory.mktemp("programs"))


def start_command(directory, environment, mode, *flags):
    log = directory.parent / f"{time.monotonic_ns()}.log"
    words = [mode, processes.TINY_MODEL, f"--model_dir={directory}", *flags]
    return processes.Command(words, log, **environment)


@pytest.fixture
def tekoa(tmp_path, cache):
    """`tekoa("train", flags..., directory="run")` starts the command on the tiny model."""
    commands = []

    def start(mode, *flags, directory="run", **environment):
        environment = {**cache, **environment}
        commands.append(start_command(tmp_path / directory, environment, mode, *flags))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    command = start_command(directory, cache, "train")
    assert command.wait()[0] == 0, command.output()
    return directory


def newest(directory):
    return max(paths.list_steps(directory), default=-1)


def steps_shown(directory, tag):
    return [step for step, _ in events.read_points(directory).get(tag, [])]


def assert_same_end(directory, undisturbed):
    assert_trees_equal(store.load(directory), store.load(undisturbed))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_saves_and_the_resumed_run_is_exact(tekoa, undisturbed, figure, tmp_path, number):
    run = tmp_path / "run"
    command = tekoa("train", "--module_config.step_seconds=0.02")
    command.wait_until(lambda: newest(run) >= 10)
    time.sleep(random.Random(int(number)).uniform(0, 0.4))
    command.send(number)
    code, seconds = command.wait()
    stopped_at = newest(run)
    assert code == 75, command.output()
    assert f"Stopped at step {stopped_at}." in command.output()
    command = tekoa("train")
    assert command.wait()[0] == 0, command.output()
    assert f"Resuming from step {stopped_at}." in command.output()
    assert_same_end(run, undisturbed)
    figure({"seconds_to_exit": round(seconds, 1)}, exit_code=code, steps_lost=0)


def test_tensorboard_after_four_kills_has_every_point_once(tekoa, undisturbed, figure, tmp_path):
    run, rng = tmp_path / "run", random.Random(3)

    def n_lost_before_last_commit():
        committed = set(range(5, newest(run) + 1, 5))
        return len(committed - set(steps_shown(run / "train", "train/loss")))

    command = tekoa("train", TEKOA_FAULT_AT="before_tb_flush:3:SIGKILL")
    assert command.wait()[0] == -signal.SIGKILL
    n_lost = n_lost_before_last_commit()
    for until in (15, 30, 45):
        command = tekoa("train", "--module_config.step_seconds=0.02")
        command.wait_until(lambda until=until: newest(run) >= until)
        time.sleep(rng.uniform(0, 0.1))
        command.send(signal.SIGKILL)
        command.wait()
        n_lost += n_lost_before_last_commit()
    command = tekoa("train")
    assert command.wait()[0] == 0, command.output()
    expected = list(range(5, 61, 5))
    steps = steps_shown(run / "train", "train/loss")
    missing, twice = len(set(expected) - set(steps)), len(steps) - len(set(steps))
    figure(kills=4, lost_before_last_commit=n_lost, missing=missing, twice=twice)
    assert n_lost == 0
    assert steps == expected
    assert_same_end(run, undisturbed)
    assert not [p for p in run.iterdir() if "tmp" in p.name or "trash" in p.name]


def test_a_killed_evaluator_misses_nothing_and_reports_nothing_twice(
    tekoa, undisturbed, figure, tmp_path
):
    run, rng = undisturbed, random.Random(4)
    note = run / "eval" / "last_evaluated_ckpt"
    flags = ["--eval_pattern=eval", "--save_high=accuracy"]
    for after in (10, 25, 40):
        command = tekoa("eval_wait", *flags, "--module_config.eval_seconds=0.04", directory=run)
        command.wait_until(
            lambda after=after: note.exists() and int(note.read_text().split("_")[-1]) >= after
        )
        time.sleep(rng.uniform(0, 0.2))
        command.send(signal.SIGKILL)
        command.wait()
    command = tekoa("eval_wait", *flags, directory=run)
    assert command.wait()[0] == 0, command.output()
    expected = list(range(0, 61, 5))
    steps = steps_shown(run / "eval", "eval/accuracy")
    missing, twice = len(set(expected) - set(steps)), len(steps) - len(set(steps))
    figure(kills=3, missing=missing, twice=twice)
    assert steps == expected
    assert len(paths.list_steps(run / "eval" / "high_accuracy")) >= 1
    assert not list((run / "eval").glob("*pin*"))


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_nan_never_reaches_the_disk(tekoa, figure, tmp_path, action):
    run = tmp_path / "run"
    command = tekoa("train", "--module_config.poison=37", f"--on_nan={action}")
    code, _ = command.wait()
    assert code == {"stop": 76, "skip": 0}[action], command.output()
    bad = 0
    for step in paths.list_steps(run):
        leaves = jax.tree.leaves(store.load(run, step=step)["model_params"])
        bad += not all(np.isfinite(leaf).all() for leaf in leaves)
    assert bad == 0
    if action == "skip":
        figure(exit_code=code, nan_params_on_disk=bad, steps_done=newest(run))
        # Steps skipped earlier do not stop a run with --on_nan=stop.
        command = tekoa("train", "--max_train_steps=65", "--on_nan=stop")
        assert command.wait()[0] == 0, command.output()
        return
    output = command.output()
    first_bad = int(output.split("At step ")[1].split()[0])
    figure(exit_code=code, nan_params_on_disk=bad, steps_before_the_bad_one_lost=0)
    assert newest(run) == first_bad - 1
    assert "Traceback" not in output
    # With good data the run resumes from the last good step.
    command = tekoa("train")
    assert command.wait()[0] == 0, command.output()
    assert f"Resuming from step {first_bad - 1}." in command.output()


def test_a_changed_seed_is_refused_unless_it_is_allowed(tekoa, undisturbed):
    flags = ["train", "--random_seed=5", "--max_train_steps=70"]
    facts = (undisturbed / "run.json").read_text()
    command = tekoa(*flags, directory=undisturbed)
    assert command.wait()[0] == 2
    assert "seed was 4, is 5" in command.output()
    assert (undisturbed / "run.json").read_text() == facts
    command = tekoa(*flags, "--allow_data_changes", directory=undisturbed)
    assert command.wait()[0] == 0, command.output()
    assert newest(undisturbed) == 70
