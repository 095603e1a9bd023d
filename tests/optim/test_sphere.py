"""Sphere against its formulas in NumPy, and the promises of its parts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim import sphere
from tekoa.optim.scales.auto import scales_of_function
from tekoa.optim.scales.roles import Role
from tekoa.optim.scales.table import ScaleRow, ScaleTable

SHAPES = {"bias": (4,), "body": (9, 4), "head": (4, 3), "table": (7, 9)}


def network(params, ids):
    x = jnp.tanh(params["table"][ids] @ params["body"] + params["bias"])
    return x @ params["head"]


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


PARAMS = {name: normal(i, shape) for i, (name, shape) in enumerate(SHAPES.items())}
TABLE = scales_of_function(network, PARAMS, np.arange(14) % 7)
ETA = {row.name[-1]: row.eta for row in TABLE}


def grads(step):
    return {name: normal([step, i], shape) for i, (name, shape) in enumerate(SHAPES.items())}


def run(tx, params, n_steps, grads=grads):
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(n_steps):
        updates, state = update(grads(i), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def rms(x, axis=None):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=axis))


def orthogonal_direction(x, n_iterations):
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for _ in range(n_iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v / rms((u * s) @ v)


def expected_params(
    n,
    *,
    c=0.5,
    b1=0.9,
    b2=0.99,
    factor=2.0,
    hidden=1.0,
    bound=0.2,
    nesterov=True,
    n_iterations=3,
):
    """The formulas in float64, parameter by parameter."""
    params = {name: x.astype(np.float64) for name, x in PARAMS.items()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    n_warm = math.ceil(0.05 * n)
    for t in range(1, n + 1):
        xi = c / math.sqrt(n) * min(1, t / n_warm)
        xi *= 1 - max(0, (t - n_warm) / (n + 1 - n_warm))
        age = max(1, t - 1)  # Of the moments, which start again after the first step.
        for name, g in grads(t - 1).items():
            if t == 2:
                m[name], v[name] = np.zeros_like(m[name]), np.zeros_like(v[name])
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g.astype(np.float64) ** 2
            u = m[name] / (1 - b1**age)
            if nesterov:
                u = (b1 * m[name] + (1 - b1) * g) / (1 - b1 ** (age + 1))
            u = u / np.sqrt(v[name] / (1 - b2**age))
            if name == "body" and n_iterations:
                u = orthogonal_direction(u, n_iterations)
            else:
                u = u / max(rms(u), bound)
            side = hidden**0.5 if name == "table" else hidden
            w = params[name] - xi * ETA[name] * u * (factor if name == "head" else side)
            if name in ("body", "table"):
                w = w * ETA[name] / rms(w)
            elif name == "head" and t == 1:
                w = w * min(1, ETA[name] / rms(w))
            params[name] = w
    return params


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"c": 1.0, "b1": 0.5, "b2": 0.9}, {"c": 1.0, "b1": 0.5, "b2": 0.9}),
        ({"output_factor": 3.0, "min_rms": 0.9}, {"factor": 3.0, "bound": 0.9}),
        ({"nesterov": False}, {"nesterov": False}),
        ({"full_depth": 2.0}, {"hidden": 2 / 3}),  # Table, body and head are three in a row.
        ({"n_iterations": 0}, {"n_iterations": 0}),
    ],
    ids=["default", "decays", "output", "momentum", "depth", "not orthogonal"],
)
def test_steps_follow_the_formulas(settings, expected):
    params, _ = run(sphere.sphere(TABLE, n_steps=12, **settings), PARAMS, 12)
    for name, value in expected_params(12, **expected).items():
        np.testing.assert_allclose(params[name], value, rtol=2e-4, atol=1e-5, err_msg=name)


def test_hidden_kernels_end_on_their_scale():
    params, _ = run(sphere.sphere(TABLE, n_steps=10), PARAMS, 1)
    assert rms(params["body"]) == pytest.approx(ETA["body"], rel=1e-5)
    assert rms(params["table"]) == pytest.approx(ETA["table"], rel=1e-5)


def test_output_starts_no_larger_than_its_scale_and_grows_freely():
    tx = sphere.sphere(TABLE, n_steps=10)
    large = {**PARAMS, "head": 10 * PARAMS["head"]}
    assert rms(run(tx, large, 1)[0]["head"]) == pytest.approx(ETA["head"], rel=1e-5)
    small = {**PARAMS, "head": 1e-3 * PARAMS["head"]}
    assert rms(run(tx, small, 1)[0]["head"]) < 0.5 * ETA["head"]
    same_sign = lambda i: jax.tree.map(lambda w: -np.sign(w), PARAMS)
    assert rms(run(tx, large, 10, same_sign)[0]["head"]) > 1.2 * ETA["head"]


def test_initial_size_of_hidden_kernels_does_not_matter():
    larger = {**PARAMS, "body": 10 * PARAMS["body"], "table": 0.1 * PARAMS["table"]}
    tx = sphere.sphere(TABLE, learning_rate=0.0)
    params, other = run(tx, PARAMS, 1)[0], run(tx, larger, 1)[0]
    for name in ("body", "table"):
        np.testing.assert_allclose(params[name], other[name], rtol=1e-5)


def stacked(params, x):
    for i in range(3):
        x = jnp.tanh(x @ params["stack"][i])
    return x @ params["head"]


def test_ends_of_residual_branches_share_the_scale():
    def residual(params, x):
        x = x @ params["in"]
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return (x + x @ params["last"]) @ params["head"]

    sizes = {"in": (4, 6), "up": (6, 8), "down": (8, 6), "last": (6, 6), "head": (6, 2)}
    params = {name: normal(0, shape) for name, shape in sizes.items()}
    table = scales_of_function(residual, params, normal(1, (32, 4)))
    moved, _ = run(
        sphere.sphere(table, n_steps=10), params, 1, lambda i: jax.tree.map(jnp.ones_like, params)
    )
    for name, share in {"in": 1, "up": 1, "down": 2, "last": 2}.items():
        assert rms(moved[name]) == pytest.approx(table[name].eta / share, rel=1e-5), name


def test_steps_of_branches_are_longer_and_those_of_tables_shrink_less_with_depth():
    def residual(params, x):
        x = x @ params["in"] + params["rows"][jnp.arange(32) % 3]
        return (x + jnp.tanh(x @ params["up"]) @ params["down"]) @ params["head"]

    sizes = {"in": (4, 6), "rows": (3, 6), "up": (6, 8), "down": (8, 6), "head": (6, 2)}
    params = {name: normal(0, shape) for name, shape in sizes.items()}
    table = scales_of_function(residual, params, normal(1, (32, 4)))
    smaller = {"branch_depth_power": 1.0, "table_depth_power": 1.0}
    for settings, table_share, share in (({}, 0.5**0.5, 1.4), (smaller, 0.5, 0.7)):
        tx = sphere.scale_by_sphere(table, full_depth=2.0, **settings)  # Of four.
        updates, _ = tx.update(params, tx.init(params))
        factors = {"in": 0.5, "rows": table_share, "up": share, "down": share, "head": 2.0}
        for name, factor in factors.items():
            expected = factor * table[name].eta
            assert rms(updates[name]) == pytest.approx(expected, rel=1e-5), name


def test_gradients_of_oversized_weights_are_forgotten():
    huge = lambda i: grads(i) if i else jax.tree.map(lambda g: 1e6 * g, grads(0))
    expected, _ = run(sphere.sphere(TABLE, n_steps=10), PARAMS, 4)
    params, _ = run(sphere.sphere(TABLE, n_steps=10), PARAMS, 4, huge)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-4, err_msg=name)


def test_layers_of_a_stack_move_like_layers_of_their_own():
    x = normal(0, (8, 5))
    stack = np.stack([normal(i, (5, 5)) * 3**i for i in range(3)])
    table = scales_of_function(stacked, {"stack": stack, "head": normal(9, (5, 2))}, x)
    alone = ScaleTable(
        [
            ScaleRow(
                name=(str(i),),
                shape=(5, 5),
                eta=float(np.broadcast_to(table.eta_fn(("stack",), (3, 5, 5)), (3, 1, 1))[i, 0, 0]),
                slot_shape=(1, 5),
                role=Role(kind="contracted", contracted=(0,), free=(1,)),
                reason="by hand",
            )
            for i in range(3)
        ]
    )
    g = normal(7, (3, 5, 5))
    tx = sphere.sphere(ScaleTable([table["stack"]]), n_steps=5)
    together, _ = run(tx, {"stack": stack}, 3, lambda i: {"stack": g * (i + 1)})
    apart, _ = run(
        sphere.sphere(alone, n_steps=5),
        {str(i): stack[i] for i in range(3)},
        3,
        lambda step: {str(i): g[i] * (step + 1) for i in range(3)},
    )
    for i in range(3):
        np.testing.assert_allclose(together["stack"][i], apart[str(i)], rtol=1e-4, atol=1e-6)


def test_reduced_second_moments_have_the_shapes_of_the_slots():
    state = sphere.scale_by_sphere(TABLE, is_reduced=True).init(PARAMS)
    assert {name: x.shape for name, x in state.nu.items()} == {
        "bias": (),
        "body": (1, 4),
        "head": (1, 3),
        "table": (7, 1),
    }
    assert {name: x.shape for name, x in state.mu.items()} == SHAPES


def test_reduced_second_moments_average_over_the_slot():
    tx = sphere.scale_by_sphere(TABLE, is_reduced=True)
    g = grads(0)
    updates, _ = tx.update(g, tx.init(PARAMS))
    u = orthogonal_direction(g["body"] / rms(g["body"], axis=0), 3)
    np.testing.assert_allclose(updates["body"], ETA["body"] * u, rtol=1e-4)


def test_slots_of_bfloat16_parameters_are_float32():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    tx = sphere.sphere(TABLE, n_steps=5)
    bf16_grads = lambda i: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), grads(i))
    params, state = run(tx, params, 3, bf16_grads)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves((state[0].inner.mu, state[0].inner.nu))} == {
        jnp.dtype("float32")
    }
    assert rms(params["body"].astype(np.float32)) == pytest.approx(ETA["body"], rel=0.01)


def test_gradient_of_zero_moves_only_to_the_scale():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    start = {**PARAMS, "head": 0.1 * PARAMS["head"]}
    params, _ = run(sphere.sphere(TABLE, n_steps=5), start, 2, lambda i: zeros)
    np.testing.assert_array_equal(params["head"], start["head"])
    np.testing.assert_allclose(
        params["body"], PARAMS["body"] * ETA["body"] / rms(PARAMS["body"]), rtol=1e-5
    )


def test_kernel_of_zeros_without_a_gradient_stays_zero():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    params, _ = run(sphere.sphere(TABLE, n_steps=5), zeros, 2, lambda i: zeros)
    assert all(not np.any(x) for x in jax.tree.leaves(params))


def test_factors_of_an_adapter_are_not_rescaled():
    base = normal(0, (9, 4))
    fn = lambda p, x: jnp.tanh(x @ (base + p["a"] @ p["b"])) @ p["head"]
    params = {"a": normal(1, (9, 2)), "b": np.zeros((2, 4), "f"), "head": normal(2, (4, 3))}
    table = scales_of_function(fn, params, normal(3, (6, 9)))
    g = jax.tree.map(np.ones_like, params)
    moved, _ = run(sphere.sphere(table, n_steps=100), params, 1, lambda i: g)
    assert rms(moved["b"]) < 0.05


def test_direction_of_a_step_does_not_depend_on_the_scale_of_gradients():
    tx = sphere.sphere(TABLE, n_steps=10)
    tiny = lambda i: jax.tree.map(lambda x: x * 1e-12, grads(i))
    for name, value in run(tx, PARAMS, 3)[0].items():
        np.testing.assert_allclose(run(tx, PARAMS, 3, tiny)[0][name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tail", ["cosine", "linear", "constant"])
def test_size_of_a_step_rises_and_falls(tail):
    size = sphere.step_size(100, c=1.0, warmup=0.1, tail=tail)
    values = [float(size(i)) for i in range(101)]
    assert values[:10] == pytest.approx([0.01 * (i + 1) for i in range(10)])
    assert values[99] > 0
    assert values[100] == pytest.approx(0.1 if tail == "constant" else 0, abs=1e-7)
    halfway = {"cosine": 0.05, "linear": 0.05, "constant": 0.1}[tail]
    assert values[55] == pytest.approx(halfway, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "The number of steps must be positive, got None. Pass n_steps="),
        ({"n_steps": 0}, "must be positive, got 0"),
        ({"n_steps": 5, "c": -1}, "c must be positive"),
        ({"n_steps": 5, "warmup": 1}, r"warmup in \[0, 1\)"),
        ({"n_steps": 5, "tail": "step"}, "tail must be one of"),
        ({"n_steps": 5, "b1": 1.0}, r"b1 must be in \[0, 1\)"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        sphere.sphere(TABLE, **settings)


def test_parameter_that_the_table_lacks_is_an_error():
    with pytest.raises(LookupError, match="no parameter 'other'"):
        sphere.sphere(TABLE, n_steps=5).init({"other": np.zeros(3, "f")})


def test_update_without_params_is_an_error():
    tx = sphere.sphere(TABLE, n_steps=5)
    with pytest.raises(ValueError, match="Sphere needs params"):
        tx.update(grads(0), tx.init(PARAMS))


def test_auto_for_trains_a_network_without_settings():
    x = normal(0, (256, 8))
    y = np.tanh(x @ normal(1, (8, 2))).sum(1, keepdims=True) * 7
    params = {"w": 30 * normal(2, (8, 16)), "b": np.zeros(16, "f"), "v": normal(3, (16, 1))}

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2)

    tx = sphere.auto_for(loss, params, x, y, n_steps=200)

    def step(_, carry):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params, _ = jax.lax.fori_loop(0, 200, step, (params, tx.init(params)))
    assert loss(params, x, y) < 0.02 * np.var(y)


def loop(params, x, n=24):
    """A recurrence that multiplies a perturbation of its state, with kernels on their scales."""

    def cell(state, _):
        a, b = jnp.split((x + state) @ params["up"], 2, axis=-1)
        return (a * b) @ params["down"], None

    state, _ = jax.lax.scan(cell, jnp.zeros_like(x), None, length=n)
    return state @ params["head"]


def test_kernels_of_a_recurrence_start_small_and_are_free():
    shapes = {"up": (8, 24), "down": (12, 8), "head": (8, 2)}
    params = {name: 10 * normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    table = scales_of_function(loop, params, normal(5, (16, 8)))
    assert [row.role.is_recurrent for row in table] == [True, False, True]
    tx = sphere.sphere(table, n_steps=100)
    grads = lambda step: {name: normal([step, 1], shape) for name, shape in shapes.items()}
    first, _ = run(tx, params, 1, grads)
    for name in ("up", "down"):
        assert rms(first[name]) == pytest.approx(table[name].eta / 2, rel=1e-5)
    assert rms(first["head"]) == pytest.approx(table["head"].eta, rel=1e-5)
    zeros, _ = run(tx, jax.tree.map(np.zeros_like, params), 3, grads)
    for name in ("up", "down"):  # They are not enlarged, and grow by their steps alone.
        assert 0 < rms(zeros[name]) < 0.1 * table[name].eta
    kept, _ = run(sphere.sphere(table, n_steps=100, recurrent_start=0.0), params, 3, grads)
    assert rms(kept["up"]) == pytest.approx(table["up"].eta, rel=1e-5)
