"""The long form of a model file, run by the command as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import tekoa
from tekoa.testing import assert_trees_equal

HERE = pathlib.Path(__file__).parent
FLAGS = (
    "--train_pattern=dummy://",
    "--valid_pattern=dummy://",
    "--valid_batch_size=8",
    "--train_batch_size=8",
    "--train_shuffle_buf=40",
    "--check_every_steps=5",
    "--random_seed=3",
    "--noprogress",
)


def command(*words, **environment):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tekoa", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE), **environment},
        check=False,
    )


def train(directory, *flags, model="long_model.py", **environment):
    return command("train", HERE / model, f"--model_dir={directory}", *FLAGS, *flags, **environment)


def stored(directory, step):
    return tekoa.load_checkpoint(directory / f"checkpoint_{step}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 17 steps: the last period is not a whole one."""
    directory = tmp_path_factory.mktemp("long")
    done = train(directory, "--max_train_steps=17")
    assert done.returncode == 0, done.stderr
    return directory


def by_hand(directory, step=17):
    """What the model gives on the held-out examples, in numpy."""
    items = stored(directory, step)
    sys.path.insert(0, str(HERE))
    try:
        import long_model
    finally:
        sys.path.remove(str(HERE))
    x, y = long_model.examples(21, seed=2)
    dense = items["model_params"]["Dense_0"]
    mean = items["model_state"]["average"]["mean"]
    return (x - mean) @ dense["kernel"][:, 0] + dense["bias"][0], y


def points(directory):
    """All points of the event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_training_ends_exactly_and_its_last_period_is_validated(trained):
    found = tekoa.store.inspect(trained)
    assert [info.step for info in found] == [0, 5, 10, 15, 17]
    names = {"train/train_loss", "train/valid_loss", "train/weights_l2norm", "mine/bias"}
    assert names <= set(found[-1].metrics)
    predicted, y = by_hand(trained)
    assert found[-1].metrics["train/valid_loss"] == pytest.approx(
        np.mean((predicted - y) ** 2), rel=1e-5
    )
    assert found[-1].metrics["mine/bias"] == pytest.approx(
        float(stored(trained, 17)["model_params"]["Dense_0"]["bias"][0])
    )


def test_tensorboard_has_the_points_of_the_original(trained):
    found = points(trained / "train")
    assert [point.step for point in found["train/train_loss"]] == [5, 10, 15, 17]
    assert [point.step for point in found["train/valid_loss"]] == [0, 5, 10, 15, 17]
    assert "params/Dense_0/kernel (3, 1)" in found


def test_a_killed_run_goes_on_to_the_same_bits(trained, tmp_path):
    killed = train(tmp_path, "--max_train_steps=17", DIE_AT="15")
    assert killed.returncode == -9
    resumed = train(tmp_path, "--max_train_steps=17")
    assert resumed.returncode == 0, resumed.stderr
    assert "Goes on from step" in resumed.stdout
    assert_trees_equal(stored(tmp_path, 17), stored(trained, 17))


def test_evaluation_is_that_of_numpy(trained):
    flags = ["--eval_pattern=dummy://", "--eval_batch_size=8", "--json"]
    done = command("eval", HERE / "long_model.py", f"--model_dir={trained}", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    predicted, y = by_hand(trained)
    assert found["step"] == 17
    assert found["n"] == 21
    assert found["mse"] == pytest.approx(np.mean((predicted - y) ** 2), rel=1e-5)


def test_predictions_are_in_order_and_the_last_partial_batch_is_there(trained, tmp_path):
    file = tmp_path / "lines.txt"
    flags = ["--pred_pattern=dummy://", "--pred_batch_size=8", f"--pred_output={file}"]
    done = command("predict", HERE / "long_model.py", f"--model_dir={trained}", *flags)
    assert done.returncode == 0, done.stderr
    first, *lines = file.read_text().splitlines()
    assert first == "y"
    np.testing.assert_allclose([float(line) for line in lines], by_hand(trained)[0], atol=2e-6)


def test_the_short_form_trains_to_the_same_losses(trained, tmp_path):
    done = train(tmp_path, "--max_train_steps=17", model="short_model.py")
    assert done.returncode == 0, done.stderr
    for long, short in zip(tekoa.store.inspect(trained), tekoa.store.inspect(tmp_path)):
        name = "train/valid_loss"
        assert long.metrics[name] == pytest.approx(short.metrics[name], rel=1e-5)
    a, b = (stored(directory, 17)["model_params"] for directory in (trained, tmp_path))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)
