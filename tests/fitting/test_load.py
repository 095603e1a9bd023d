import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
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
    with pytest.raises(errors.MismatchError, match=r"kernel: \(2, 1\) instead of \(3, 1\)"):
        tekoa.load(run[0], nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(errors.MismatchError, match="bias: not in the model"):
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
    loaded.eval(), trained.eval()
    np.testing.assert_array_equal(loaded(X), trained(X))
    assert nnx.state(loaded, nnx.RngKey) == nnx.state(trained, nnx.RngKey)
