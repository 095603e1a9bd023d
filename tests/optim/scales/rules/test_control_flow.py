"""Loops, branches, calls and shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales.auto import scales_of_function

X = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], (32, 16)), jnp.float32)  # Unit rms.


def rnn(p, xs, *, unrolled=False):
    def cell(h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
        return h, h

    h = jnp.zeros((xs.shape[1], 24))
    if not unrolled:
        return jax.lax.scan(cell, h, xs)[1] @ p["v"]
    hs = []
    for x in xs:
        h, _ = cell(h, x)
        hs.append(h)
    return jnp.stack(hs) @ p["v"]


RNN = {"w": (16, 24), "u": (24, 24), "b": (24,), "v": (24, 3)}


def etas(fn, shapes, *batch):
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return {"/".join(row.name): row.eta for row in scales_of_function(fn, params, *batch)}


def test_scan_gives_the_scales_of_the_unrolled_loop():
    xs = jnp.stack([X] * 4)
    unrolled = etas(lambda p, xs: rnn(p, xs, unrolled=True), RNN, xs)
    assert etas(rnn, RNN, xs) == pytest.approx(unrolled, rel=1e-5)


def test_recurrent_kernel_ignores_the_zero_initial_state():
    scales = etas(rnn, RNN, jnp.stack([X] * 4))
    # tanh of a sum of two unit normals has rms 0.72; the input kernel sees unit data.
    assert scales["u"] == pytest.approx(24**-0.5 / 0.7, rel=0.05)
    assert scales["w"] == pytest.approx(0.25)


def test_gain_of_a_state_with_zero_start_is_a_gain():
    def model(p, xs):
        return jax.lax.scan(lambda h, x: (p["a"] * h + x @ p["w"], h), jnp.zeros((32, 8)), xs)[1]

    scales = etas(model, {"a": (8,), "w": (16, 8)}, jnp.stack([X] * 4))
    assert scales == pytest.approx({"a": 1.0, "w": 0.25})


def test_reverse_scan_and_long_scan():
    def model(p, xs):
        step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]), h)
        return jax.lax.scan(step, jnp.zeros((32, 24)), xs, reverse=True)[1] @ p["v"]

    assert set(etas(model, RNN, jnp.stack([X] * 3))) == set(RNN)
    long = jnp.ones((300, 2, 16))
    assert scales_of_function(rnn, {k: jnp.zeros(s) for k, s in RNN.items()}, long)["v"].placed


@pytest.mark.parametrize("form", ["scan", "fori"])
def test_every_layer_of_a_stack_is_interpreted(form):
    def scanned(p, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]

    def counted(p, x):
        return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"][i]), x)

    fn = {"scan": scanned, "fori": counted}[form]
    table = scales_of_function(fn, {"w": jnp.zeros((3, 16, 16))}, X)
    row = table["w"]
    assert row.slot_shape == (3, 1, 16)
    # The first layer sees unit data, the others tanh of it, whose rms is 0.63.
    expected = np.array([0.25, 0.25 / 0.63, 0.25 / 0.63]).reshape(3, 1, 1)
    np.testing.assert_allclose(table.eta_fn(row.name, row.shape), expected, rtol=0.05)


def test_all_branches_are_interpreted():
    def model(p, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ p["a"], lambda x: 2 * x @ p["b"], x)

    scales = etas(model, {"a": (16, 3), "b": (16, 3)}, X)
    assert scales == pytest.approx({"a": 0.25, "b": 0.125})
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert etas(model, {"a": (16, 3), "b": (16, 3)}, abstract) == pytest.approx(scales, rel=0.01)


@pytest.mark.parametrize("shapes_only", [False, True])
def test_while_loop_inside_a_custom_gradient(shapes_only):
    @jax.custom_vjp
    def iterate(w, x):
        step = lambda carry: (jnp.tanh(carry[0] @ w + x), carry[1] + 1)
        return jax.lax.while_loop(lambda carry: carry[1] < 5, step, (jnp.zeros_like(x), 0))[0]

    iterate.defvjp(lambda w, x: (iterate(w, x), w), lambda w, g: (w, g))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype) if shapes_only else X
    scales = etas(lambda p, x: iterate(p["w"], x) @ p["v"], {"w": (16, 16), "v": (16, 2)}, x)
    assert scales["w"] == pytest.approx(0.25 / 0.72, rel=0.1)


def test_shards_count_the_terms_of_the_full_array():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def shard(w, v, x):
        return jax.lax.psum(jax.nn.relu(x @ w) @ v, "model")

    specs = (P(None, "model"), P("model", None), P())
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P())
    scales = etas(lambda p, x: sharded(p["w"], p["v"], x), {"w": (16, 8), "v": (8, 4)}, X)
    assert scales == pytest.approx({"w": 0.25, "v": 0.5}, rel=0.02)  # 1 / sqrt(8 / 2)


def test_loop_without_parameters_runs_unchanged():
    def model(p, x):
        doubled = jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]
        return doubled @ p["w"]

    assert etas(model, {"w": (16, 3)}, X) == pytest.approx({"w": 0.25 / 8})
