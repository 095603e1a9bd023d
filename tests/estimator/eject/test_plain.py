"""Plain forms have the bits of what they stand for."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core import trees
from tekoa.estimator.eject import plain
from tekoa.optim import orthogonal
from tekoa.optim.amos import slots
from tekoa.optim.scales.roles import Role
from tekoa.sharding import constrain

PARAMS = {
    "a": jnp.ones((3, 4, 5)),
    "b": jnp.linspace(0.0, 1.0, 5),
    "c": jnp.ones((5, 2)),
}


def check_same_steps(tx, other, params=PARAMS):
    rng = np.random.default_rng(0)
    states, both = [tx.init(params), other.init(params)], [params, params]
    for _ in range(4):
        grads = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), params)
        for i, t in enumerate((tx, other)):
            updates, states[i] = jax.jit(t.update)(grads, states[i], both[i])
            both[i] = optax.apply_updates(both[i], updates)
        for a, b in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape_fn", [None, lambda name, shape: (1,) * len(shape)])
def test_amos(shape_fn):
    def rate(step):
        return 0.1 / step

    scales = {
        name: (0.5, slots.slot_shape_of(shape_fn, (name,), leaf.shape))
        for name, leaf in PARAMS.items()
    }
    tx = tekoa.amos(rate, lambda name, shape: 0.5, shape_fn, beta=0.98)
    check_same_steps(tx, plain.amos(rate, 0.98, scales, by_slabs=False))


def test_mean_of_squares_by_slabs():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(512, 256)), jnp.float32)
    means = [
        jax.jit(lambda x: slots._mean_by_slabs(x).reshape(1, 256))(x),
        jax.jit(lambda x: plain.mean_of_squares(x, (1, 256), True))(x),
    ]
    np.testing.assert_array_equal(*means)


# The blocks of the last are filled up with zeros.
@pytest.mark.parametrize("shape", [(128, 100), (30, 40), (70, 3, 50), (67, 70)])
def test_orthogonalised(shape):
    role = Role(kind="contracted", contracted=(0,), free=tuple(range(1, len(shape))))
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    blocks = orthogonal.blocks_of(shape, role, 64)
    results = [
        jax.jit(lambda x: orthogonal.orthogonalise(x, role, n_iterations=3, max_side=64))(x),
        jax.jit(lambda x: plain.orthogonalised(x, *blocks))(x),
    ]
    np.testing.assert_array_equal(*results)


def test_are_finite():
    for value in (0.0, np.nan, np.inf):
        params = {**PARAMS, "b": PARAMS["b"].at[1].set(value)}
        assert plain.are_finite(params) == all(trees.are_finite(params)) == (value == 0)


def test_small_parts():
    assert plain.Mean._fields == tekoa.Mean._fields
    assert plain.constrain(3, "batch") == constrain(3, "batch") == 3
    config = plain.Config(a=plain.Config(b=1))
    assert config.a["b"] == config["a"].b == 1


def test_nothing_of_tekoa_is_used():
    assert "tekoa." not in inspect.getsource(plain)
