import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim import amos
from tekoa.optim.squares import mean_of_squares


@pytest.fixture(params=[1, 8], ids=["one device", "several devices"])
def n_devices(request, monkeypatch):
    """Lets the two ways of summing up be chosen."""
    monkeypatch.setattr(jax, "device_count", lambda: request.param)


@pytest.mark.parametrize(
    ("shape", "slot_shape", "axes"),
    [
        ((512, 160), (1, 160), (0,)),
        ((512, 160), (160,), (0,)),
        ((512, 4, 40), (1, 4, 40), (0,)),
        ((516, 160), (1, 160), (0,)),
        ((512, 160), (512, 1), (1,)),
        ((512, 160), (), (0, 1)),
        ((3, 3, 128, 64), (1, 1, 1, 64), (0, 1, 2)),
        ((70000,), (), (0,)),
        ((16, 3), (1, 3), (0,)),
        ((512, 160), (512, 160), ()),
        ((1, 70000), (1, 70000), ()),
        ((0, 3), (0, 3), ()),
    ],
)
def test_means_are_those_of_numpy(n_devices, shape, slot_shape, axes):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mean = jax.jit(mean_of_squares, static_argnums=1)(x, slot_shape)
    expected = np.mean(np.square(x, dtype=np.float64), axis=axes, keepdims=True)
    np.testing.assert_allclose(mean, expected.reshape(slot_shape), rtol=1e-6)


def test_amos_does_the_same_either_way(monkeypatch):
    params = {"w": jnp.linspace(-1, 1, 512 * 160).reshape(512, 160)}
    tx = amos.amos(0.1, lambda name, shape: 1.0, lambda name, shape: (1, 160))
    found = []
    for n in (1, 8):
        monkeypatch.setattr(jax, "device_count", lambda n=n: n)
        now, state = params, tx.init(params)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(jax.tree.map(jnp.cos, now), state, now)
            now = optax.apply_updates(now, updates)
        found.append((now, state))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
