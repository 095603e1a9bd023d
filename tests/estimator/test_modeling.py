import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tekoa.estimator import modeling


def test_cross_entropy_is_that_of_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    labels = rng.integers(5, size=(2, 3))
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logs, labels[..., None], -1)[..., 0]
    found = modeling.sparse_xe_with_logits(labels, logits, reduce_all=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(
        modeling.sparse_xe_with_logits(labels, logs, mask, normalized=True),
        expected[mask].sum(),
        rtol=1e-5,
    )


def test_the_ratio_of_a_normalized_loss_stays():
    loss, size = modeling.normalize_loss_by_size(jnp.float32(18.0), 9)
    assert (float(loss), float(size)) == (6, 3)


def test_slices_along_any_axis():
    parts = modeling.unstack(jnp.arange(6).reshape(2, 3), -2)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]


def test_initial_numbers_are_within_two_deviations():
    made = modeling.truncated_normal_initializer(0.1)(jax.random.key(0), (1000,), jnp.float32)
    assert 0.05 < float(made.std()) < 0.1
    assert float(jnp.abs(made).max()) <= 0.2 + 1e-6


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return modeling.Dropout(0.5)(x)


class Outer(nn.Module):
    @nn.compact
    @modeling.global_kwargs(pass_down=True)
    def __call__(self, x):
        return Inner()(x)


def test_arguments_reach_what_is_called_further_down():
    x = jnp.ones((100,))
    rngs = {"dropout": jax.random.key(0)}
    kept = Outer().apply({}, x, rngs=rngs)
    dropped = Outer().apply({}, x, enable_dropout=True, rngs=rngs)
    assert (kept == 1).all()
    assert set(np.unique(dropped)) == {0.0, 2.0}
    # What was passed down once is not there the next time.
    assert (Outer().apply({}, x, rngs=rngs) == 1).all()


def test_arguments_that_nobody_has_are_refused():
    with pytest.raises(TypeError, match="has no argument 'wrong'"):
        modeling.Dropout(0.5).apply({}, jnp.ones(3), wrong=True)
    with pytest.raises(TypeError, match="must have the arguments"):
        modeling.global_kwargs("missing")(lambda x: x)
