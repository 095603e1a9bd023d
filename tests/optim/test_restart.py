"""A restarted transformation behaves as if the first update had not been."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim import restart

PARAMS = {"w": jnp.arange(3.0)}


def gradient(i):
    return {"w": jnp.asarray(np.random.default_rng(i).normal(size=3), jnp.float32)}


@pytest.mark.parametrize("make", [optax.scale_by_adam, lambda: optax.trace(0.9)])
def test_later_updates_are_those_of_a_new_optimizer(make):
    restarted, fresh = restart.restart_after_first(make()), make()
    update = jax.jit(restarted.update)
    updates, state = update(gradient(0), restarted.init(PARAMS), PARAMS)
    expected, _ = fresh.update(gradient(0), fresh.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    fresh_state = fresh.init(PARAMS)
    for i in range(1, 4):
        updates, state = update(gradient(i), state, PARAMS)
        expected, fresh_state = fresh.update(gradient(i), fresh_state, PARAMS)
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)


def test_a_first_gradient_that_is_not_finite_leaves_no_trace():
    tx = restart.restart_after_first(optax.scale_by_adam())
    _, state = tx.update({"w": jnp.full(3, jnp.inf)}, tx.init(PARAMS), PARAMS)
    updates, _ = tx.update(gradient(1), state, PARAMS)
    assert np.isfinite(updates["w"]).all()
