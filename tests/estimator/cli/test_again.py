import json

import numpy as np
import pytest

import tekoa
from tekoa.core import trees
from tekoa.estimator.cli import again, flags, main

MODEL = """
import jax.numpy as jnp, ml_collections, numpy as np, optax
from flax import linen as nn
from tekoa import Experiment, data

DEFAULTS = {"train_pattern": "dummy://", "max_train_steps": 4, "train_batch_size": 8}

def get_config():
    return ml_collections.ConfigDict({"scale": 1.0})

def open_data(config, pattern, *, train):
    return data.as_source({"x": np.arange(16, dtype=np.float32)[:, None]})

def experiment(config, facts):
    return Experiment(
        model=nn.Dense(1), loss=lambda y, batch: jnp.mean((y - config.scale * batch["x"]) ** 2),
        optimizer=optax.sgd(0.01), inputs=lambda batch: batch["x"])
"""


def params(directory):
    loaded = tekoa.load_checkpoint(directory)["model_params"]
    return {name: np.asarray(leaf) for name, leaf in trees.flatten_named(loaded).items()}


def test_a_run_is_repeated_to_the_same_bits_after_its_model_file_has_changed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    train = ["train", "mine.py", "--noprogress", "--module_config.scale=3", "--ema=0.5"]
    assert main.main([*train, "--train_shuffle_buf=4"]) == 0
    path.write_text("raise ValueError")
    assert main.main(["train", "--again=runs/mine", "--noprogress"]) == 0
    assert "mine.py has changed or is gone: using the copy" in capsys.readouterr().err
    first, second = params("runs/mine"), params("runs/mine-again")
    assert all((first[name] == second[name]).all() for name in first)
    record = json.loads((tmp_path / "runs/mine-again/run.json").read_text())
    assert record["flags"]["ema"] == 0.5
    assert record["settings"] == {"scale": 3.0}


def record_of(directory, **changes):
    record = {
        "model": "tekoa.models.mnist",
        "random_seed": 7,
        "flags": {
            "module_imp": "mnist",
            "train_batch_size": 16,
            "save_high": ["a"],
            "json": True,
            "overrides": {"warmup": "3"},
            "of_a_later_version": 1,
        },
        "versions": {},
        **changes,
    }
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize("given", [{}, {"given": ["train_batch_size", "save_high", "json"]}])
def test_the_command_line_wins_over_the_record_and_the_record_over_the_model(tmp_path, given):
    record_of(tmp_path / "run", **given)
    again_flag = f"--again={tmp_path / 'run'}"
    _, config = flags.parse(["train", again_flag, "--module_config.warmup=5", "--random_seed=8"])
    config = again.repeat(config).with_defaults({"train_batch_size": 1, "train_epochs": 2})
    assert (config.module_imp, config.random_seed, config.train_batch_size) == ("mnist", 8, 16)
    assert config.train_epochs == 2
    assert config.save_high == ("a",)
    assert config.overrides == {"warmup": "5"}
    assert config.model_dir == f"{tmp_path / 'run'}-again"
    assert config.json is False


def test_changes_during_the_run_are_reported(tmp_path, capsys):
    whole = {"model": "mnist", "random_seed": 4, "versions": {"jax": "0.0.1"}}
    starts = [
        {"step": 0, "flags": {"ema": None, "json": False}, **whole},
        {"step": 5, "flags": {"ema": None, "json": True}},
        {"step": 9, "flags": {"ema": 0.5, "json": True}},
    ]
    record_of(tmp_path / "run", starts=starts)
    again.repeat(flags.parse(["train", f"--again={tmp_path / 'run'}"])[1])
    errors = capsys.readouterr().err
    assert "changed its settings at step 9: using the last ones" in errors
    assert "jax was 0.0.1, is " in errors


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("missing", [], "has no run.json: it is not the directory of a run"),
        ("run", ["--model_dir=run"], "is the run itself"),
    ],
)
def test_a_wrong_run_is_refused(name, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_of(tmp_path / "run")
    with pytest.raises(flags.UsageError) as error:
        again.repeat(flags.parse(["train", f"--again={name}", *arguments])[1])
    assert message in str(error.value)
