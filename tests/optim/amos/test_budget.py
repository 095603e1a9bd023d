"""The later form of Amos against its formulas in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim.amos import budget
from tekoa.optim.scales.auto import amos_for

ETA = 0.3


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected(theta, grads, *, n_steps, shared_axis, beta=0.999, horizon=0.7):
    theta = theta.astype(np.float64)
    k = theta.shape[shared_axis] if shared_axis is not None else 1
    mean = lambda x: x if shared_axis is None else x.mean(shared_axis, keepdims=True)
    s = math.sqrt(k)
    q = math.sqrt(1 - 1 / s)
    tau = q * math.log(s * (1 + q) ** 2)
    xi = math.sqrt(2 * (tau + math.sqrt(2) - 1) / (horizon * n_steps))
    v, b = mean(0 * theta), mean(0 * theta)
    for t, g in enumerate(grads, start=1):
        g2 = mean(g.astype(np.float64) ** 2)
        v = beta * v + (1 - beta) * g2
        norm = np.maximum(v / (1 - beta**t), g2)
        bv = (2 * np.sqrt(1 + b) / (1 + np.sqrt(1 + 2 / (2 + tau) * np.sqrt(1 + b)))) ** 2 - 1
        step = xi**2 / (2 * np.sqrt(1 + b)) * (g2 / norm) * theta + ETA * xi * g / np.sqrt(norm)
        theta = theta - step / (1 + ETA * np.sqrt(1 + b) * bv)
        b = b + xi**2 / np.sqrt(1 + b) * (1 / math.sqrt(k) + b)
    return theta


@pytest.mark.parametrize(("slots", "shared_axis"), [(None, None), ((1, 4), 0)])
def test_steps_follow_the_formulas(slots, shared_axis):
    shape_fn = None if slots is None else lambda name, shape: slots
    tx = budget.scale_by_amos_budget(20, lambda name, shape: ETA, shape_fn)
    params, grads = {"w": normal(0, (6, 4))}, [normal(i + 1, (6, 4)) for i in range(8)]
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update({"w": g}, state, params)
        params = optax.apply_updates(params, updates)
    value = expected(normal(0, (6, 4)), grads, n_steps=20, shared_axis=shared_axis)
    np.testing.assert_allclose(params["w"], value, rtol=2e-4, atol=1e-5)


def test_amos_for_uses_it_if_the_number_of_steps_is_set():
    fn = lambda p, x: x @ p["w"]
    params, x = {"w": normal(0, (6, 4))}, normal(1, (8, 6))
    tx = amos_for(fn, params, x, n_steps=20, momentum=None)
    updates, state = tx.update({"w": normal(2, (6, 4))}, tx.init(params), params)
    assert state.v["w"].shape == (1, 4)
    assert np.all(np.isfinite(updates["w"]))
    assert jnp.any(state.b["w"] > 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either n_batches= or"),
        ({"n_steps": 5, "n_batches": 5}, "either n_batches= or"),
        ({"n_steps": 0}, "n_steps must be positive"),
        ({"n_steps": 5, "learning_rate": 0.1}, "omit learning_rate"),
        ({"n_batches": 0}, "n_batches must be positive"),
    ],
)
def test_settings_out_of_range(settings, message):
    params = {"w": normal(0, (6, 4))}
    with pytest.raises(ValueError, match=message):
        amos_for(lambda p, x: x @ p["w"], params, normal(1, (8, 6)), **settings)


def test_momentum_averages_the_updates():
    plain = budget.amos_for_budget(20, lambda name, shape: ETA, momentum=None)
    averaged = budget.amos_for_budget(20, lambda name, shape: ETA)
    params, grads = {"w": normal(0, (3,))}, {"w": normal(1, (3,))}
    first, _ = plain.update(grads, plain.init(params), params)
    smaller, _ = averaged.update(grads, averaged.init(params), params)
    np.testing.assert_allclose(smaller["w"], 0.1 * np.asarray(first["w"]), rtol=1e-5)
