"""Rows of the table: fallbacks and their reasons, tied embeddings."""

import jax
import jax.numpy as jnp
import pytest

from tekoa.optim.scales.auto import scales_of_function

X = jnp.ones((8, 16))


def test_integer_leaf_has_no_gradient():
    row = scales_of_function(
        lambda p, x: x @ p["w"] * p["n"].astype(jnp.float32),
        {"w": jnp.zeros((16, 3)), "n": jnp.int32(3)},
        X,
    )["n"]
    assert not row.placed
    assert "int32" in row.reason


def test_fallback_of_a_zero_parameter_is_its_fan_in():
    params = {"w": jnp.zeros((16, 3)), "spare": jnp.zeros((9, 2))}
    row = scales_of_function(lambda p, x: x @ p["w"], params, X)["spare"]
    assert row.eta == pytest.approx(1 / 3)
    assert row.reason.endswith("using 1/sqrt(fan-in), its initial rms is 0")
    assert row.slot_shape == (9, 2)


def test_fallback_reason_says_that_only_the_shape_is_known():
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((16, 3)), "spare": jnp.zeros((9, 2))})
    row = scales_of_function(lambda p, x: x @ p["w"], shapes, X)["spare"]
    assert row.reason.endswith("its initial rms is unknown")


def test_a_discarded_result_gives_no_scale():
    def model(p, x):
        x @ p["spare"]
        return x @ p["w"]

    params = {"w": jnp.zeros((16, 3)), "spare": jnp.full((16, 3), 2.0)}
    row = scales_of_function(model, params, X)["spare"]
    assert not row.placed
    assert row.reason.startswith("unused")


def test_shapes_of_parameters_with_a_real_batch_give_the_same_table():
    def model(p, x):
        x = jax.nn.relu(x @ p["w"] + p["b"])
        return (x - x.mean(-1, keepdims=True)) @ p["v"]

    params = {"w": jnp.zeros((16, 8)), "b": jnp.zeros(8), "v": jnp.zeros((8, 2))}
    shapes = jax.eval_shape(lambda: params)
    real, abstract = (scales_of_function(model, p, X) for p in (params, shapes))
    assert str(real) == str(abstract)


def test_layers_after_a_tied_embedding_see_its_scale():
    # Tied rows have a small rms, which the kernel after them compensates.
    def model(p, ids):
        return jnp.tanh(p["e"][ids] @ p["w"]) @ p["e"].T

    params = {"e": jnp.zeros((50, 16)), "w": jnp.zeros((16, 16))}
    table = scales_of_function(model, params, jnp.arange(50))
    expected = 0.25 / 0.63  # 16 terms, tanh of a unit normal.
    assert table["e"].eta == pytest.approx(expected, rel=0.05)
    assert table["w"].eta == pytest.approx(0.25 / expected, rel=0.05)


def stack(p, x):
    """Three residual layers whose kernels are stacked, and an output."""

    def layer(x, kernel):
        return x + jnp.tanh(x) @ kernel, None

    return jax.lax.scan(layer, x @ p["in"], p["layers"])[0] @ p["out"]


def recurrent(p, xs):
    def cell(h, x):
        h = jnp.tanh(x @ p["in"] + h @ p["hidden"])
        return h, h

    return jax.lax.scan(cell, jnp.zeros((8, 4)), jnp.stack([xs] * 5))[1] @ p["out"]


def gelu_block(p, x):
    x = x @ p["in"]
    return (x + jax.nn.gelu(x @ p["up"]) @ p["down"]) @ p["out"]


def normalised_weight(p, x):
    w = p["w"] / jnp.linalg.norm(p["w"], axis=0)
    return jnp.tanh(x @ p["in"]) @ w @ p["out"]


@pytest.mark.parametrize(
    ("fn", "shapes", "depth", "n_branches", "inside"),
    [
        (stack, {"in": (16, 4), "layers": (3, 4, 4), "out": (4, 2)}, 5, {"layers": 3}, {"layers"}),
        # In, hidden in the second step, out; later steps add nothing.
        (recurrent, {"in": (16, 4), "hidden": (4, 4), "out": (4, 2)}, 3, {}, set()),
        (
            gelu_block,
            {"in": (16, 4), "up": (4, 8), "down": (8, 4), "out": (4, 2)},
            4,
            {},
            {"up", "down"},
        ),
        (normalised_weight, {"in": (16, 4), "w": (4, 4), "out": (4, 2)}, 3, {}, set()),
        (lambda p, x: x @ p["a"] + x @ p["b"], {"a": (16, 2), "b": (16, 2)}, 1, {}, set()),
    ],
    ids=["stack", "recurrent", "gelu", "weight norm", "sum"],
)
def test_depth_and_residual_branches(fn, shapes, depth, n_branches, inside):
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    table = scales_of_function(fn, params, X)
    assert table.depth == depth
    assert {r.name[-1]: r.n_branches for r in table if r.n_branches > 1} == n_branches
    assert {r.name[-1] for r in table if r.in_branch} == inside


@pytest.mark.parametrize("is_tied", [True, False])
def test_positions_have_the_scale_of_the_tied_embedding_they_are_added_to(is_tied):
    def model(p, ids):
        x = p["table"][ids] + p["positions"][jnp.arange(4)]
        return jnp.tanh(x @ p["w"]) @ (p["table"].T if is_tied else p["out"])

    shapes = {"table": (7, 16), "positions": (4, 16), "w": (16, 16), "out": (16, 7)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    table = scales_of_function(model, params, jnp.arange(8).reshape(2, 4) % 7)
    expected = table["table"].eta if is_tied else 1.0
    assert table["positions"].eta == pytest.approx(expected, rel=0.01)
    assert (table["table"].eta < 1) == is_tied
