"""Mistakes of newcomers: each gets an answer that names the mistake and what to do."""

import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.errors import FlaxError

import tekoa
from tekoa.core.nonfinite import NonFiniteError
from tekoa.store.errors import MismatchError

X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(24, 4)
Y = np.arange(24) % 3
IMAGES = np.zeros((8, 3, 6, 6), np.float32)


def fit(model=None, data=(X, Y), **options):
    model = linen.Dense(3) if model is None else model
    settings = {"loss": "cross_entropy", "optimizer": "auto", "steps": 1, "batch_size": 8}
    return tekoa.fit(model, data, **{**settings, "show_progress": False, **options})


def message(error):
    return " ".join([str(error.value), *getattr(error.value, "__notes__", ())])


class TwoOutputs(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x), x.mean()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"learning_rate": 0.1}, "no argument 'learning_rate'. Use optimizer="),
        ({"validation_split": 0.1}, "Use validation=0.1"),
        ({"epoch": 3}, "Did you mean 'epochs'?"),
        ({"loss": "sparse_categorical_crossentropy"}, "Did you mean 'cross_entropy'?"),
        ({"loss": "BCEWithLogitsLoss"}, "Did you mean 'bce'?"),
        ({"loss": None}, "pass loss="),
        ({"metrics": ["acc"], "validation": 0.5}, "Did you mean 'accuracy'?"),
        ({"data": (X, Y.astype(np.float32))}, "Use y.astype(int) for class numbers"),
        ({"data": X}, "the data has no targets. Pass both, as (x, y)"),
        ({"validation": X}, "the data has no targets. Pass both, as (x, y)"),
        ({"data": (X.tolist(), Y.tolist())}, "np.asarray(x)"),
        ({"data": (X, Y[:9])}, "'inputs': 24, 'targets': 9"),
        ({"batch_size": 8.0}, "batch_size must be a whole number, or"),
        ({"batch_size": 100, "epochs": 1, "steps": None}, "Use a smaller batch_size"),
        ({"steps": None, "epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"data": lambda: 0}, "got function. Pass what it returns."),
        ({"data": ((X[i], Y[i]) for i in range(24))}, "yields examples instead of batches"),
        ({"model": linen.Dense}, "Dense is a class"),
        ({"model": TwoOutputs()}, "float32[8,3], float32[], int32[8]"),
        (
            {"model": nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), "data": (IMAGES, Y[:8])},
            "inputs float32[8,3,6,6] and targets int64[8]",
        ),
        ({"validation": (X[:, :2], Y)}, "inputs (2,) instead of (4,)"),
        ({"callbacks": [3]}, "must be callable, got 3"),
        ({"layout": "data"}, "must be a Layout, such as Layout(mesh), got 'data'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_named(options, text):
    with pytest.raises((TypeError, ValueError, FlaxError)) as error:
        fit(**options)
    assert text in message(error)


def test_callbacks_are_checked_before_training():
    steps = []
    with pytest.raises(TypeError, match="must be callable"):
        fit(callbacks=[lambda checkpoint: steps.append(checkpoint) or checkpoint, "tensorboard"])
    assert not steps


def test_inputs_and_targets_must_be_a_pair():
    with pytest.raises(TypeError, match=r"fit\(model, \(x, y\), ...\)"):
        tekoa.fit(linen.Dense(3), X, Y)  # pyright: ignore


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((X, Y + 1), "class number 3, but the model has 3 outputs"),
        ((np.where(X > 0.9, np.nan, X), Y), "NaN or Inf: inputs from row"),
    ],
    ids=["labels", "inputs"],
)
def test_data_that_cannot_be_learned_is_named_when_the_loss_is_not_finite(data, text):
    for options in ({}, {"label_smoothing": 0.1}):
        with pytest.raises(NonFiniteError) as error:
            fit(data=data, optimizer=optax.sgd(0.1), steps=3, **options)
        assert text in message(error)


def test_one_hot_targets_train_and_measure_like_class_numbers():
    rows = [Y, np.eye(3, dtype=np.float32)[Y], np.eye(3, dtype=int)[Y]]
    metrics = ["accuracy", "f1"]
    scores = [fit(data=(X, y), validation=(X, y), metrics=metrics).evaluate() for y in rows]
    assert scores[1] == pytest.approx(scores[0])
    assert scores[2] == pytest.approx(scores[0])
    assert 0 < scores[0]["accuracy"] < 1


def test_a_single_row_is_no_batch():
    result = fit()
    assert result.predict(X[:1]).shape == (1, 3)
    with pytest.raises(tekoa.DataError, match=r"shape \(rows, 4\).* as x\[None\]"):
        result.predict(X[0])


@pytest.mark.parametrize(
    "change", [{"model": linen.Dense(4)}, {"data": (X[:16], Y[:16])}], ids=["model", "data"]
)
def test_a_directory_with_another_run_is_named(change, tmp_path):
    fit(directory=tmp_path)
    with pytest.raises((tekoa.DataError, MismatchError)) as error:
        fit(directory=tmp_path, steps=2, **change)
    assert f"{tmp_path} contains an earlier run" in message(error)


def test_what_is_probably_not_meant_is_printed(capsys):
    model = linen.Sequential([linen.Conv(2, (3, 3)), lambda x: x.mean((1, 2)), linen.Dense(3)])
    fit(model, (IMAGES, Y[:8]), show_progress=True, metrics=["accuracy"])
    printed = capsys.readouterr().out
    assert "x.transpose(0, 2, 3, 1)" in printed
    assert "Metrics are measured on validation data" in printed
    fit(model, (IMAGES.transpose(0, 2, 3, 1), Y[:8]), show_progress=True)
    assert "transpose" not in capsys.readouterr().out
