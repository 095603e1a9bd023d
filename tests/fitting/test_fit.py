import pathlib

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tekoa
from tekoa.testing import assert_trees_equal

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
TEST = X[:30] + 0.1, Y[:30]


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def functions():
    def init(rng, x):
        return {"w": jax.random.normal(rng, (4, 2)) * 0.1, "b": jnp.zeros(2)}

    return init, lambda params, x: x @ params["w"] + params["b"]


MODELS = {
    "linen": lambda: (LinenNet(), None),
    "nnx": lambda: (NnxNet(nnx.Rngs(0)), None),
    "equinox": lambda: (eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)), None),
    "haiku": lambda: (hk.transform(lambda x: hk.Linear(2)(jnp.tanh(x))), None),
    "functions": functions,
}


def fit(name="nnx", data=(X, Y), **options):
    model, apply = MODELS[name]()
    settings = {
        "loss": "cross_entropy",
        "optimizer": optax.adam(0.05),
        "epochs": 8,
        "batch_size": 16,
        "show_progress": False,
        "apply": apply,
        **options,
    }
    return tekoa.fit(model, data, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_every_library_is_trained_evaluated_and_loaded(name, tmp_path):
    result = fit(name, validation=TEST, metrics=["accuracy"], directory=tmp_path / "run")
    assert result.is_complete
    assert result.step == 48
    assert result.history["eval/loss"][-1] < result.history["eval/loss"][0]
    scores = result.evaluate()
    assert scores["accuracy"] > 0.85
    outputs = result.predict(TEST[0])
    assert outputs.shape == (30, 2)
    assert scores["accuracy"] == pytest.approx(np.mean(outputs.argmax(1) == TEST[1]))
    model, apply = MODELS[name]()
    loaded = tekoa.load(tmp_path / "run", model, apply=apply)
    call = {
        "equinox": lambda m, x: jax.vmap(m)(x),
        "haiku": lambda params, x: model.apply(params, None, x),
        "functions": apply,
    }.get(name, lambda m, x: m(x))
    for one in (result.model, loaded):
        np.testing.assert_allclose(call(one, TEST[0]), outputs, rtol=1e-5, atol=1e-6)


def test_it_is_bit_for_bit_the_loop_written_out():
    def loss(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    result = fit(loss=loss, optimizer=optax.adam(0.01), ema=0.9)
    loop = tekoa.TrainLoop(
        NnxNet(nnx.Rngs(0)),
        tekoa.TrainTask(
            optimizer=optax.adam(0.01),
            loss=loss,
            data=tekoa.data.as_source({"x": X, "y": Y}).batches(16, seed=0, shuffle=True, epochs=8),
            split=lambda batch: ((batch["x"],), (batch["y"],)),
        ),
        n_steps=48,
        n_steps_per_checkpoint=6,
        ema=0.9,
    )
    list(loop)
    assert_trees_equal(result.state.params, loop.state.params)
    assert_trees_equal(result.state.average, loop.state.average)


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path):
    scores = iter([0.1, 0.9, 0.3, 0.2])
    seen = {}

    def score(logits, labels):
        return jnp.zeros(())

    def plant(checkpoint):
        value = next(scores)
        seen[value] = checkpoint.model_params
        return checkpoint.with_metrics("eval", {"loss": 0.0, "mine": value})

    fit(
        validation=TEST,
        metrics={"mine": score},
        best=("mine", "max"),
        callbacks=plant,
        epochs=4,
        directory=tmp_path / "run",
    )
    best = tekoa.load(tmp_path / "run", NnxNet(nnx.Rngs(5)), best=("mine", "max"))
    np.testing.assert_array_equal(best.a.kernel[...], seen[0.9]["a"]["kernel"])
    last = tekoa.load(tmp_path / "run", NnxNet(nnx.Rngs(5)))
    np.testing.assert_array_equal(last.a.kernel[...], seen[0.2]["a"]["kernel"])


def test_training_stops_early_when_nothing_improves(tmp_path):
    result = fit(validation=TEST, optimizer=optax.sgd(0.0), patience=2)
    assert result.step == 18  # The first check is the best, then two without improvement.


def test_a_fraction_is_held_out_for_validation():
    result = fit(validation=0.25, metrics=["accuracy"], batch_size=8)
    assert result.step == 8 * 72 // 8
    assert "eval/accuracy" in result.history.columns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "Pass steps= or epochs=, not both; got 3 and 8"),
        ({"loss": "mes"}, "There is no loss 'mes'"),
        ({"best": "accuracy"}, "needs validation data"),
        ({"best": "accuracy", "validation": TEST}, "pass directory="),
        (
            {"best": "f1", "validation": TEST, "directory": "x"},
            "'f1' is not a metric of the validation",
        ),
        ({"metrics": ["acc"]}, "There is no metric 'acc'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        fit(**options)
    assert not list(pathlib.Path().iterdir())


def test_steps_without_epochs_repeat_the_data():
    assert fit(epochs=None, steps=20).step == 20


def test_batch_sizes_follow_a_schedule_that_a_resumed_run_continues(tmp_path):
    def train(steps, directory=None):
        return tekoa.fit(
            NnxNet(nnx.Rngs(0)),
            (X, Y),
            loss="cross_entropy",
            optimizer=optax.adam(0.1),
            steps=steps,
            steps_per_check=3,
            batch_size={0: 8, 5: 16},
            directory=directory,
            show_progress=False,
        )

    train(6, tmp_path)
    resumed, whole = train(9, tmp_path), train(9)
    assert_trees_equal(resumed.loop.state.params, whole.loop.state.params)
    assert whole.loop.checkpoint().data_state["examples"] == 5 * 8 + 4 * 16
    with pytest.raises(ValueError, match="cannot change the rows of ready batches"):
        tekoa.fit(NnxNet(nnx.Rngs(0)), [(X, Y)], loss="cross_entropy", batch_size={0: 8, 5: 16})


def test_only_some_parameters_are_trained():
    result = fit(trainable="b/", epochs=1)
    assert set(result.state.params) == {"a", "b"}
    start = NnxNet(nnx.Rngs(0))
    np.testing.assert_array_equal(result.model.a.kernel[...], start.a.kernel[...])
    assert np.abs(result.model.b.kernel[...] - start.b.kernel[...]).max() > 0


def test_a_loss_that_cannot_be_split_needs_a_reduction():
    def contrastive(logits, labels):
        return jnp.var(logits) + 0.0 * labels.sum()

    with pytest.raises(tekoa.ReductionError, match="reduction='mean'"):
        fit(loss=contrastive, accumulate=2, epochs=1)
    assert fit(loss=contrastive, accumulate=2, epochs=1, reduction="mean").step == 6


def test_steps_repeat_a_list_of_batches():
    batches = [(X[:48], Y[:48]), (X[48:], Y[48:])]
    assert fit(data=batches, epochs=None, steps=5).step == 5


def test_a_loader_need_not_know_its_length():
    class Loader:
        def __iter__(self):
            return iter([(X, Y)] * 3)

        def __len__(self):
            raise TypeError("This stream has no length.")

    assert fit(data=Loader(), epochs=None).step == 3
