"""Validation sets, targets and early ends of `fit`."""

import json

import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.store.commit import paths

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
SETS = {"clean": (X[:32], Y[:32]), "noisy": (X[:20], 1 - Y[:20])}


def fit(**options):
    settings = {"steps": 24, "steps_per_check": 4, "batch_size": 16, "show_progress": False}
    settings |= {"loss": "cross_entropy", "optimizer": optax.adam(0.05), "metrics": ["accuracy"]}
    return tekoa.fit(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), (X, Y), **{**settings, **options})


def steps_with(history, name):
    return [row["step"] for row in history.rows if name in row]


def test_each_data_set_has_its_metrics_at_its_own_interval(tmp_path):
    result = fit(validation=SETS, validate_every={"noisy": 3}, directory=tmp_path, steps=26)
    history = result.history
    assert steps_with(history, "eval/clean/loss") == [4, 8, 12, 16, 20, 24, 26]
    assert steps_with(history, "eval/noisy/loss") == [12, 24, 26]
    scores = result.evaluate()
    assert scores["clean/accuracy"] > 0.8
    assert scores["noisy/accuracy"] < 0.4
    assert scores["noisy/loss"] == pytest.approx(history["eval/noisy/loss"][-1])
    # The best is by the first data set.
    assert paths.list_steps(tmp_path / "low_eval_clean_loss")


def test_the_best_and_the_stop_name_their_data_set(tmp_path):
    options = {"validation": SETS, "validate_every": {"noisy": 2}, "directory": tmp_path}
    # The noisy loss only grows: the first one, at step 8, stays the best.
    for _ in range(2):
        result = fit(best="noisy/loss", patience=1, **options)
        assert result.step == 16
        assert result.is_complete
    (step,) = paths.list_steps(tmp_path / "low_eval_noisy_loss")
    assert step == 8


def test_a_resumed_run_validates_at_the_same_steps(tmp_path):
    options = {"validation": SETS, "validate_every": 2}
    whole = fit(directory=tmp_path / "whole", **options)
    fit(directory=tmp_path / "parts", steps=12, **options)
    parts = fit(directory=tmp_path / "parts", **options)
    name = "eval/noisy/loss"
    assert steps_with(whole.history, name) == [8, 16, 24]
    assert [x for x in parts.history[name] if not np.isnan(x)][-2:] == whole.history[name][3::2]


def test_training_stops_at_a_value_and_stays_stopped(tmp_path, capsys):
    losses = fit(validation=SETS["clean"]).history["eval/loss"]
    bound = losses[2] * 1.0001
    options = {"validation": SETS["clean"], "stop_when": f"loss<={bound}", "directory": tmp_path}
    for _ in range(2):
        result = fit(**options, show_progress=True)
        assert (result.step, result.is_complete) == (12, True)
    out = capsys.readouterr().out
    assert f"Stopped early at step 12: loss is {losses[2]:.6g}, <= {bound:.6g}." in out
    assert "Nothing to do: loss is" in out
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 12]


def test_a_dict_of_fields_is_one_data_set():
    data = {"x": X, "y": Y}
    model, adam = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.adam(0.05)
    options = {"loss": "cross_entropy", "steps": 2, "show_progress": False, "optimizer": adam}
    result = tekoa.fit(model, data, validation={"x": X.tolist(), "y": Y.tolist()}, **options)
    assert "eval/loss" in result.history.columns
    result = tekoa.fit(model, data, validation={"a": data, "b": data}, **options)
    assert result.history["eval/a/loss"] == result.history["eval/b/loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": SETS, "validate_every": {"noise": 2}}, "names noise, but .* clean, noisy"),
        ({"validation": SETS, "validate_every": 0}, "from 1 up, got 0"),
        (
            {"validation": SETS, "stop_when": "loss<1"},
            "'loss' is not a metric .* clean/loss",
        ),
        ({"validation": SETS, "stop_when": "clean/loss"}, "A condition is a metric"),
        ({"validation": {"a/b": (X, Y)}}, "no name for a data set"),
        ({"stop_when": "loss<1"}, "stop_when= needs validation data"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_smoothing_changes_training_and_not_what_is_reported():
    plain, smoothed = (
        fit(validation=SETS["clean"], optimizer=optax.sgd(rate), label_smoothing=smoothing)
        for rate, smoothing in ((0.0, 0.0), (0.0, 0.4))
    )
    for name in ("train/loss", "eval/loss"):
        assert smoothed.history[name] == plain.history[name]
    trained = [
        fit(optimizer=optax.sgd(0.5), steps=120, **options)
        for options in ({}, {"label_smoothing": 0.4}, {"z_loss": 0.1})
    ]
    sizes = [np.ptp(result.predict(X), axis=1).mean() for result in trained]
    assert sizes[1] < 0.8 * sizes[0]
    normalizers = [np.abs(np.logaddexp(*result.predict(X).T)).mean() for result in trained]
    assert normalizers[2] < 0.8 * normalizers[0]
    with pytest.raises(ValueError, match='options of loss="cross_entropy"'):
        fit(loss="mse", z_loss=0.1)
