import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import tekoa
from tekoa.core.model import run_model
from tekoa.store import errors

X = np.ones((8, 2), np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    result = tekoa.fit(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
        (X, X[:, :1]),
        loss="mse",
        optimizer=optax.sgd(0.1),
        steps=3,
        ema=0.5,
        directory=directory,
        show_progress=False,
    )
    return directory, result


def test_the_average_is_loaded_unless_the_last_weights_are_asked_for(run):
    directory, result = run
    fresh = nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    averaged, last = tekoa.load(directory, fresh), tekoa.load(directory, fresh, average=False)
    np.testing.assert_array_equal(averaged.kernel[...], result.state.average["kernel"])
    np.testing.assert_array_equal(last.kernel[...], result.state.params["kernel"])
    assert np.abs(averaged.kernel[...] - last.kernel[...]).max() > 0


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(run):
    with pytest.raises(errors.MismatchError, match=r"kernel .*\[2,1\] -> float32\[3,1\]"):
        tekoa.load(run[0], nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(errors.MismatchError, match=r"bias +unexpected"):
        tekoa.load(run[0], nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0)))


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(errors.StoreError):
        tekoa.load(tmp_path, nnx.Linear(2, 1, rngs=nnx.Rngs(0)))


def test_a_module_with_random_keys_and_statistics_is_loaded(tmp_path):
    def make():
        rngs = nnx.Rngs(0)
        layers = (
            nnx.Linear(2, 3, rngs=rngs),
            nnx.BatchNorm(3, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )
        return nnx.Sequential(*layers, nnx.Linear(3, 1, rngs=rngs))

    result = tekoa.fit(
        make(),
        (X * np.arange(8, dtype=np.float32)[:, None], X[:, :1]),
        loss="mse",
        optimizer=optax.sgd(0.1),
        steps=3,
        directory=tmp_path,
        show_progress=False,
    )
    loaded, trained = tekoa.load(tmp_path, make()), result.model
    np.testing.assert_array_equal(loaded(X), trained(X))
    assert nnx.state(loaded, nnx.RngKey) == nnx.state(trained, nnx.RngKey)


def linen_model(width):
    return linen.Sequential([linen.Dense(width), linen.relu, linen.Dense(1)])


def haiku_model(width):
    return hk.transform(lambda x: hk.Linear(1)(jax.nn.relu(hk.Linear(width)(x))))


def functions_model(width):
    def init(rng, x):
        return {"up": jnp.ones((x.shape[1], width)), "down": jnp.ones((width, 1))}

    return tekoa.as_model_fns(init, lambda params, x: x @ params["up"] @ params["down"])


@pytest.mark.parametrize("make", [linen_model, haiku_model, functions_model])
def test_weights_of_another_model_are_refused_if_init_needs_inputs(make, tmp_path):
    """Weights of these models depend on the inputs, whose shapes the checkpoint records."""
    tekoa.fit(
        make(3),
        (X, X[:, :1]),
        loss="mse",
        optimizer=optax.sgd(0.1),
        steps=1,
        directory=tmp_path,
        show_progress=False,
    )
    assert tekoa.load(tmp_path, make(3)) is not None
    with pytest.raises(errors.MismatchError, match=r"float32\[2,3\] -> float32\[2,4\]"):
        tekoa.load(tmp_path, make(4))


def test_a_linen_model_that_refuses_the_inputs_of_the_run_is_refused(tmp_path):
    model = linen.Sequential([linen.Dense(3), linen.BatchNorm(use_running_average=True)])
    loop = tekoa.TrainLoop(
        model=model,
        task=tekoa.TrainTask(optimizer=optax.sgd(0.1), loss=lambda y, _: y.mean(), data=[(X, X)]),
        n_steps=1,
    )
    writer = tekoa.CheckpointFileWriter(tmp_path)
    writer(loop.next_step())
    writer.close()
    tekoa.load(tmp_path, model)(X)
    with pytest.raises(errors.MismatchError, match=r"missing|unexpected|No parameter"):
        tekoa.load(tmp_path, linen.Dense(3))
    with pytest.raises(errors.MismatchError, match=r"cannot be initialised .*float32\[8,2\]"):
        tekoa.load(tmp_path, linen.Sequential([lambda x: x.reshape(-1, 7), linen.Dense(3)]))


@pytest.mark.parametrize(
    "model", [linen_model(3), nnx.Linear(2, 1, rngs=nnx.Rngs(0))], ids=["linen", "nnx"]
)
def test_parameters_that_were_not_trained_are_loaded_too(model, tmp_path):
    loop = tekoa.TrainLoop(
        model=model,
        task=tekoa.TrainTask(
            optimizer=optax.sgd(0.1),
            loss=lambda y, _: jnp.square(y).mean(),
            data=[(X, X)],
            trainable="kernel$",
        ),
        n_steps=1,
    )
    writer = tekoa.CheckpointFileWriter(tmp_path)
    checkpoint = writer(loop.next_step())
    writer.close()
    params, variables = checkpoint.model_params, checkpoint.model_state
    (outputs,), _ = run_model(
        loop.model_fns, params, variables, (X,), rng=jax.random.key(0), train=False
    )
    np.testing.assert_array_equal(tekoa.load(tmp_path, model)(X), outputs)


def test_a_best_checkpoint_that_was_not_kept_is_named(tmp_path):
    with pytest.raises(errors.StoreError, match="has no best checkpoint by 'f1'"):
        tekoa.load(tmp_path, nnx.Linear(1, 1, rngs=nnx.Rngs(0)), best="f1")


@pytest.mark.parametrize("directory", ["runs/a", "memory://load/a"])
def test_the_best_checkpoint_of_one_of_several_sets_is_loaded(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tekoa.fit(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
        (X, X[:, :1]),
        loss="mse",
        optimizer=optax.sgd(-0.1),  # The first check is the best.
        steps=4,
        steps_per_check=1,
        validation={"seen": (X, X[:, :1]), "far": (9 * X, X[:, :1])},
        best="far/loss",
        directory=directory,
        show_progress=False,
    )
    fresh = nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    best, last = tekoa.load(directory, fresh, best="far/loss"), tekoa.load(directory, fresh)
    assert np.abs(best.kernel[...]).max() < np.abs(last.kernel[...]).max()
