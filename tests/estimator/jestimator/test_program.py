"""Model files in the long form, run by the command as a user runs it."""

import dataclasses
import json
import os
import pathlib
import sys
import types

import jax
import ml_collections
import numpy as np
import pytest
from flax import linen as nn

import tekoa
from support.processes import python
from tekoa import data
from tekoa.estimator import InferState
from tekoa.estimator.cli import flags as flags_lib
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.jestimator.program import LongProgram, flags_namespace, freeze
from tekoa.estimator.run import run
from tekoa.testing import assert_trees_equal

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parents[1]
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
    """Runs the command as a subprocess."""
    path = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment}
    return python("-m", "tekoa", *words, env=env)


def train(directory, *flags, model="long_model.py", **environment):
    return command("train", HERE / model, f"--model_dir={directory}", *FLAGS, *flags, **environment)


def stored(directory, step):
    return tekoa.load_checkpoint(directory / f"checkpoint_{step}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 17 steps: the last period is incomplete."""
    directory = tmp_path_factory.mktemp("long")
    done = train(directory, "--max_train_steps=17")
    assert done.returncode == 0, done.stderr
    return directory


def by_hand(directory, step=17):
    """Returns the outputs for the held-out examples, computed in numpy, and the targets."""
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
    """Returns all points of the event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_training_ends_exactly_and_its_last_period_is_validated(trained):
    infos = tekoa.store.inspect(trained)
    assert [info.step for info in infos] == [0, 5, 10, 15, 17]
    names = {"train/train_loss", "train/valid_loss", "train/weights_l2norm", "mine/bias"}
    assert names <= set(infos[-1].metrics)
    predicted, y = by_hand(trained)
    assert infos[-1].metrics["train/valid_loss"] == pytest.approx(
        np.mean((predicted - y) ** 2), rel=1e-5
    )
    assert infos[-1].metrics["mine/bias"] == pytest.approx(
        float(stored(trained, 17)["model_params"]["Dense_0"]["bias"][0])
    )


def test_tensorboard_has_the_points_of_jestimator(trained):
    by_tag = points(trained / "train")
    assert [point.step for point in by_tag["train/train_loss"]] == [5, 10, 15, 17]
    assert [point.step for point in by_tag["train/valid_loss"]] == [0, 5, 10, 15, 17]
    assert "params/Dense_0/kernel (3, 1)" in by_tag


def test_a_killed_run_resumes_bit_for_bit(trained, tmp_path):
    killed = train(tmp_path, "--max_train_steps=17", DIE_AT="15")
    assert killed.returncode == -9
    resumed = train(tmp_path, "--max_train_steps=17")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming from step" in resumed.stdout
    assert_trees_equal(stored(tmp_path, 17), stored(trained, 17))


def test_evaluation_equals_numpy(trained):
    flags = ["--eval_pattern=dummy://", "--eval_batch_size=8", "--json"]
    done = command("eval", HERE / "long_model.py", f"--model_dir={trained}", *flags)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    predicted, y = by_hand(trained)
    assert metrics["step"] == 17
    assert metrics["n"] == 21
    assert metrics["mse"] == pytest.approx(np.mean((predicted - y) ** 2), rel=1e-5)


def test_predictions_are_in_order_and_include_the_last_short_batch(trained, tmp_path):
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


def test_checkpoints_of_jestimator_are_evaluated_and_resumed(tmp_path, capsys):
    model = ["linear_regression", f"--model_dir={tmp_path}"]
    flags = ["--noprogress", "--random_seed=1", "--checkpoint_format=t5x"]
    assert main.main(["train", *model, *flags, "--max_train_steps=10"]) == 0
    for step in (0, 10):  # JEstimator does not write these.
        for name in ("tekoa.json", "tekoa_items", "tekoa.manifest"):
            (tmp_path / f"checkpoint_{step}" / name).unlink()
    capsys.readouterr()
    assert main.main(["eval", *model, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main.main(["train", *model, *flags, "--max_train_steps=20"]) == 0
    assert "Resuming from step 10" in capsys.readouterr().out
    assert main.main(["eval", *model, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert (before["step"], after["step"]) == (10, 20)
    assert after["mse"] < before["mse"]


# ---- the contract between the program and a model file


def program(*flags, mode="train", **functions):
    """A program for a model file with these functions."""
    module = types.ModuleType("my_model")
    vars(module).update(functions)
    _, parsed = flags_lib.parse([f"--{flag}" for flag in flags])
    settings = ml_collections.ConfigDict({"rate": 0.5})
    return LongProgram(
        run.Run(config=parsed, module=module, settings=settings, model_dir=None), mode
    )


def nothing(*args):
    raise AssertionError("not to be called")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.train_batches(0), "set --train_pattern"),
        (
            lambda p: p.train_parts((), None),
            r"my_model has no function train_step\(config, batch",
        ),
        (lambda p: p.evaluation(), r"has no function get_infer_state\(config\), which train needs"),
        (lambda p: next(p.predictions(None, None)), "has no function get_infer_state"),
        (lambda p: p.scales(), "has no function train_step"),
    ],
)
def test_missing_data_or_functions_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call(program(get_train_state=nothing))


def test_evaluation_needs_a_data_function():
    functions = dict.fromkeys(["get_infer_state", "infer_step", "get_evaluator"], nothing)
    with pytest.raises(UsageError, match=r"must set config\.eval_data_fn"):
        program("eval_pattern=dummy://", **functions).evaluation()


def test_load_config_must_return_a_config():
    long = program("train_pattern=dummy://", load_config=lambda flags: None)
    with pytest.raises(UsageError, match="load_config of my_model returned None"):
        long.train_batches(0)


def test_a_failed_assertion_about_flags_is_a_usage_error():
    def load_config(flags):
        assert flags.train_consecutive is not None, "Set --train_consecutive."

    with pytest.raises(UsageError, match=r"my_model rejected its flags: Set --train_consec"):
        program("train_pattern=dummy://", load_config=load_config).train_batches(0)


class FakeTensorFlowDataset:
    """The methods of a `tf.data.Dataset` that are used."""

    element_spec = "float32"

    def __init__(self, values):
        self._values = values

    def as_numpy_iterator(self):
        return iter(self._values)

    def skip(self, n):
        return FakeTensorFlowDataset(self._values[n:])


@pytest.mark.parametrize(
    "form", [list, FakeTensorFlowDataset, iter, lambda rows: {"x": np.float32(rows)}]
)
def test_a_data_function_may_return_any_form(form):
    rows = [float(i) for i in range(6)]
    config = types.SimpleNamespace(train_data_fn=lambda filenames: form(rows))
    flags = ["train_pattern=dummy://", "train_batch_size=4"]
    long = program(*flags, load_config=lambda flags: config)
    stream = long.train_batches(seed=0)
    batches = [batch["x"] if isinstance(batch, dict) else batch for batch, _ in zip(stream, "ab")]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 0, 1]]
    position = stream.state()
    resumed = long.train_batches(seed=0)
    resumed.restore(position)
    np.testing.assert_equal(next(resumed), next(stream))


def test_training_opens_its_data_once():
    calls = []

    def data_fn(filenames):
        calls.append(filenames)
        return [{"x": 1.0}, {"x": 2.0}]

    config = types.SimpleNamespace(train_data_fn=data_fn)
    flags = ["train_pattern=dummy://", "train_batch_size=2"]
    long = program(*flags, load_config=lambda flags: config)
    next(long.train_batches(seed=0))
    long.sample("train")
    assert len(calls) == 1


def test_data_functions_get_the_arguments_of_jestimator():
    calls = []

    def data_fn(filenames, shard_num=1, shard_index=0, epochs=1, num_take=-1):
        calls.append((filenames, num_take))
        yield from ({"x": float(i)} for i in range(5))

    def load_config(flags):
        assert flags.mode == "train"
        assert flags.train_pattern == ["dummy://"]
        assert flags.module_config.rate == 0.5
        return types.SimpleNamespace(train_data_fn=data_fn, valid_data_fn=data_fn)

    long = program(
        "train_pattern=dummy://",
        "valid_pattern=dummy://",
        "num_valid_examples=3",
        "train_batch_size=2",
        load_config=load_config,
    )
    batches = long.train_batches(seed=0)
    # A generator is opened again for each pass.
    assert [next(batches)["x"].tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert long.sample("valid")["x"].shape == (5,)
    assert {call[1] for call in calls} == {-1, 3}


def test_a_pattern_is_loaded_without_a_data_function():
    long = program("train_pattern=digits://split=test", "train_batch_size=4")
    assert next(long.train_batches(seed=0))["image"].shape == (4, 8, 8, 1)
    with pytest.raises(data.DataError, match="matches no file"):
        program("train_pattern=nosuch*.txt").train_batches(0)


def test_steps_get_a_frozen_config():
    config = ml_collections.ConfigDict({"a": 1})
    frozen = freeze(config)
    assert hash(frozen)
    assert config.frozen is frozen
    assert freeze(config) is frozen

    @dataclasses.dataclass(frozen=True)
    class Settings:
        a: int = 1

    assert freeze(Settings()) == Settings()


def test_patterns_are_passed_as_lists():
    opened = program("eval_pattern=a.txt,b.txt", mode="eval_once")._run
    flags = flags_namespace(opened, "eval_once")
    assert flags.eval_pattern == ["a.txt", "b.txt"]
    assert (flags.mode, flags.train_pattern, flags.eval_batch_size) == ("eval_once", None, 256)


class CustomPredictor:
    """A predictor that writes its own output."""

    def __init__(self):
        self.output = []

    def consume(self, infer):
        self.output.append(infer.tolist())

    def complete(self):
        self.output.append("end")


def test_a_predictor_may_write_its_own_output():
    predictor = CustomPredictor()
    functions = {
        "get_infer_state": lambda config: InferState.create(nn.Dense(1), np.zeros((1, 1))),
        "infer_step": lambda config, batch, state: state.replace(ret=batch["x"]),
        "get_predictor": lambda config: predictor,
        "load_config": lambda flags: types.SimpleNamespace(
            pred_data_fn=lambda filenames: {"x": np.arange(3.0)}
        ),
    }
    flags = ["pred_pattern=dummy://", "pred_batch_size=2"]
    assert list(program(*flags, **functions).predictions(None, None)) == []
    assert predictor.output == [[0, 1], [2], "end"]
    with pytest.raises(UsageError, match="predictor writes its own output"):
        next(program(*flags, "pred_output=x", **functions).predictions(None, None))
