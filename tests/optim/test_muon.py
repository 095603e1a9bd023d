"""Muon by roles: which parameters it takes, their rows and columns, and its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim import muon, sphere
from tekoa.optim.scales.auto import scales_of_function


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {
    "table": normal(0, (7, 6)),
    "qkv": normal(1, (6, 3, 2, 5)),
    "out": normal(2, (2, 5, 6)),
    "bias": normal(3, (6,)),
    "head": normal(4, (6, 4)),
}


def attention(params, ids):
    x = params["table"][ids]
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, params["qkv"]), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
    y = jnp.einsum("bhqt,bthk->bqhk", weights, v)
    x = x + jnp.einsum("bqhk,hkd->bqd", y, params["out"]) + params["bias"]
    return x @ params["head"]


TABLE = scales_of_function(attention, PARAMS, np.arange(12).reshape(3, 4) % 7)


def test_rows_and_columns_are_the_contracted_and_free_axes():
    numbers = muon.dimension_numbers(TABLE, PARAMS)
    assert numbers["qkv"] == optax.contrib.MuonDimensionNumbers((0,), (1, 2, 3))
    assert numbers["out"] == optax.contrib.MuonDimensionNumbers((0, 1), (2,))
    assert numbers["table"] is numbers["bias"] is numbers["head"] is None


def test_hidden_matrices_take_orthogonal_steps_and_the_rest_those_of_sphere():
    grads = jax.tree.map(lambda x: normal(9, x.shape), PARAMS)
    tx = muon.muon_for(TABLE, n_steps=10)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    by_sphere = sphere.sphere(TABLE, n_steps=10)
    expected, _ = by_sphere.update(grads, by_sphere.init(PARAMS), PARAMS)
    for name in ("table", "bias", "head"):
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5)
    moved = np.asarray(PARAMS["out"] + updates["out"])
    step = optax_step(grads["out"]).reshape(2, 5, 6)
    rate, eta = float(sphere.step_size(10)(0)), TABLE["out"].eta  # The only residual branch.
    unscaled = PARAMS["out"] - rate * eta * step / np.sqrt(np.mean(step**2))
    np.testing.assert_allclose(
        moved, unscaled * eta / np.sqrt(np.mean(unscaled**2)), rtol=1e-4, atol=1e-6
    )


def optax_step(grad):
    """The orthogonalised step of optax for a matrix whose rows are the first two axes."""
    numbers = {"w": optax.contrib.MuonDimensionNumbers(0, 1)}
    tx = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    matrix = grad.reshape(10, 6)
    return np.asarray(tx.update({"w": matrix}, tx.init({"w": matrix}))[0]["w"])


def test_a_learning_rate_replaces_the_number_of_steps():
    tx = muon.muon_for(TABLE, learning_rate=0.0)
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["bias"], 0)
    with pytest.raises(ValueError, match="number of steps must be positive"):
        muon.muon_for(TABLE)
