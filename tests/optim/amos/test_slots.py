import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim.amos import slots, transform

NAME, SHAPE = ("dense", "kernel"), (4, 3)


@pytest.mark.parametrize("eta", [0.0, 2, np.ones(3), jnp.ones((4, 1))])
def test_scales_broadcast_to_the_parameter(eta):
    scale = slots.eta_of(lambda name, shape: eta, NAME, SHAPE)
    assert isinstance(scale, np.ndarray)
    np.testing.assert_array_equal(scale, eta)


@pytest.mark.parametrize("eta", [-1.0, np.nan, np.inf, np.ones(4), np.ones((1, 4, 3))])
def test_invalid_scale_error_names_the_parameter(eta):
    with pytest.raises(ValueError, match="'dense/kernel'"):
        slots.eta_of(lambda name, shape: eta, NAME, SHAPE)


@pytest.mark.parametrize("shape", [(), (3,), [4, 1], (1, 1), (4, 3)])
def test_any_slot_shape_that_broadcasts_is_accepted(shape):
    assert slots.slot_shape_of(lambda name, _: shape, NAME, SHAPE) == tuple(shape)
    assert slots.slot_shape_of(None, NAME, SHAPE) == SHAPE


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 4, 3), 1, None])
def test_invalid_slot_shape_error_names_the_parameter(shape):
    with pytest.raises(ValueError, match="'dense/kernel'"):
        slots.slot_shape_of(lambda name, _: shape, NAME, SHAPE)


@pytest.fixture(params=[1, 8], ids=["one device", "several devices"])
def n_devices(request, monkeypatch):
    """Selects each of the two ways of summing."""
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
def test_mean_of_squares_matches_numpy(n_devices, shape, slot_shape, axes):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mean = jax.jit(slots.mean_of_squares, static_argnums=1)(x, slot_shape)
    expected = np.mean(np.square(x, dtype=np.float64), axis=axes, keepdims=True)
    np.testing.assert_allclose(mean, expected.reshape(slot_shape), rtol=1e-6)


def test_amos_agrees_for_both_ways_of_summing(monkeypatch):
    params = {"w": jnp.linspace(-1, 1, 512 * 160).reshape(512, 160)}
    tx = transform.amos(0.1, lambda name, shape: 1.0, lambda name, shape: (1, 160))
    results = []
    for n in (1, 8):
        monkeypatch.setattr(jax, "device_count", lambda n=n: n)
        now, state = params, tx.init(params)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(jax.tree.map(jnp.cos, now), state, now)
            now = optax.apply_updates(now, updates)
        results.append((now, state))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
