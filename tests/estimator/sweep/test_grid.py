"""The grid of a sweep, from text to runs."""

import pathlib

import ml_collections
import pytest
from ml_collections import config_dict

from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.sweep import grid


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("module_config.rate=1e-3..1:log:4", ("0.001", "0.01", "0.1", "1")),
        ("ema=0.5..1:3", ("0.5", "0.75", "1")),
        ("module_config.width=16..128:log:4", ("16", "32", "64", "128")),
        ("--optimizer=adam, sgd", ("adam", "sgd")),
    ],
)
def test_values(text, values):
    assert grid.parse_axis(text).values == values


def test_ranges_of_integers_are_rounded():
    settings = ml_collections.ConfigDict({"n": 500, "rate": 1.0, "is_on": True, "unset": None})
    settings.inner = {"width": 3}
    # They have a type, but no value.
    settings.update(warmup=config_dict.placeholder(int), beta=config_dict.placeholder(float))
    names = [*settings, "inner.width", "unknown", "inner.unknown"]
    texts = [f"module_config.{name}=10..1000:log:4" for name in names]
    texts += ["train_batch_size=2..9:4", "ema=0..1:3"]
    integers = grid.integers(texts, settings)
    found = {f"module_config.{name}" for name in ("n", "warmup", "inner.width")}
    assert integers == {*found, "train_batch_size"}
    assert grid.parse_axis("module_config.warmup=20..320:log:4", integers).values == (
        *("20", "50", "127", "320"),
    )
    assert grid.parse_axis("train_batch_size=1..3:9", integers).values == ("1", "2", "3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate", "must be NAME="),
        ("module_config.rate=1..2:cubic:3", "must be NAME="),
        ("module_config.rate=0..1:log:3", "above 0 for log"),
        ("module_config.rate=1..2:1", "at least 2"),
        ("learning_rte=1,2", "learning_rate"),
        ("random_seed=1,2", "--seeds"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UsageError, match=message):
        grid.parse_axis(text)


def test_lane_is_a_run_of_its_own():
    axes = [grid.parse_axis(t) for t in ("module_config.opt.rate=0.1,0.2", "ema=0.5,0.9")]
    lane = grid.lanes_of(axes, [7])[1]
    assert lane.name == "rate=0.1,ema=0.9"
    base = RunConfig(
        overrides={"width": "3"}, max_train_steps=5, set_flags=frozenset({"max_train_steps"})
    )
    config = lane.config(base, pathlib.Path("runs"))
    assert config.overrides == {"width": "3", "opt.rate": "0.1"}
    assert (config.ema, config.random_seed, config.max_train_steps) == (0.9, 7, 5)
    assert config.model_dir == "runs/rate=0.1,ema=0.9"
    assert {"ema", "random_seed", "model_dir", "max_train_steps"} <= config.set_flags


def test_same_value_twice_is_refused():
    with pytest.raises(UsageError, match="twice"):
        grid.lanes_of([grid.parse_axis("ema=0.5,0.5")], [0])
