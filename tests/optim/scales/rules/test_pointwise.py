"""Uses that are not contractions: biases, gains, embeddings, tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales.auto import scales_of_function

X = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], (8, 16)), jnp.float32)  # Unit rms.
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (4, 12)))


def find_row(fn, *shape, x=X, value=0.0):
    return scales_of_function(fn, {"w": jnp.full(shape, value)}, x)["w"]


@pytest.mark.parametrize(
    ("fn", "eta"),
    [
        (lambda p, x: x + p["w"], 0.5),
        (lambda p, x: p["w"] - x, 0.5),
        (lambda p, x: 10 * x + p["w"], 5.0),
        (lambda p, x: x + 0.1 * p["w"], 5.0),
        (lambda p, x: x * p["w"], 1.0),
        (lambda p, x: x / p["w"], 1.0),
        (lambda p, x: x * (0.1 * p["w"]), 1.0),
        (lambda p, x: x * (1 + p["w"]), 0.5),
        (lambda p, x: x * jnp.exp(p["w"]), 1.0),
        (lambda p, x: jnp.einsum("bd,d->bd", x, p["w"]), 1.0),
        (lambda p, x: jnp.maximum(3 * x, p["w"]), 3.0),
    ],
)
def test_scale_of_a_vector_used_with_unit_data(fn, eta):
    row = find_row(fn, 16, value=1.0)
    assert row.placed
    assert row.eta == pytest.approx(eta, rel=1e-4)
    assert row.slot_shape == ()


@pytest.mark.parametrize("fn", [lambda p, x: x * p["w"], lambda p, x: x * jnp.tanh(p["w"])])
def test_scalar_gain_has_scale_one(fn):
    assert (find_row(fn).eta, find_row(fn).slot_shape) == (1.0, ())


def test_bias_with_several_axes_keeps_one_slot_per_entry_of_the_first():
    row = find_row(lambda p, x: x.reshape(8, 4, 4) + p["w"], 4, 4)
    assert (row.eta, row.slot_shape) == (0.5, (4, 1))


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, i: p["w"][i],
        lambda p, i: jnp.take(p["w"], i, axis=0),
        lambda p, i: jax.nn.one_hot(i, 50) @ p["w"],
        lambda p, i: jax.vmap(lambda j: p["w"][j])(i.reshape(-1)),
        lambda p, i: p["w"].T[:, i],
    ],
    ids=["index", "take", "one-hot", "vmap", "transposed"],
)
@pytest.mark.parametrize("shapes_only", [False, True])
def test_embedding_has_scale_one_and_one_slot_per_row(fn, shapes_only):
    ids = jax.ShapeDtypeStruct(IDS.shape, IDS.dtype) if shapes_only else IDS
    row = scales_of_function(fn, {"w": jnp.zeros((50, 16))}, ids)["w"]
    assert (row.eta, row.slot_shape) == (pytest.approx(1.0), (50, 1))
    assert row.reason.startswith("looked up")


def test_position_embeddings_have_one_slot_per_position():
    def model(p, i):
        return p["embedding"][i] + p["position"][: i.shape[1]]

    params = {"embedding": jnp.zeros((50, 16)), "position": jnp.zeros((64, 16))}
    row = scales_of_function(model, params, IDS)["position"]
    assert row.eta == pytest.approx(0.5, rel=0.1)
    assert row.slot_shape == (64, 1)


def test_token_concatenated_with_data_has_the_scale_of_the_data():
    def model(p, x):
        return jnp.concatenate([jnp.broadcast_to(p["w"], (8, 1, 16)), 3 * x[:, None]], 1)

    assert find_row(model, 16).eta == pytest.approx(3.0)


def test_mask_token_has_the_scale_of_the_data_it_replaces():
    assert find_row(lambda p, x: jnp.where(x > 0, p["w"], 2 * x), 16).eta == pytest.approx(2.0)


def test_gain_times_kernel_places_both():
    params = {"gain": jnp.ones(3), "kernel": jnp.ones((16, 3))}
    table = scales_of_function(lambda p, x: x @ (p["gain"] * p["kernel"]), params, X)
    assert [row.eta for row in table] == pytest.approx([1.0, 0.25])


def test_constant_factor_of_a_kernel_divides_its_scale():
    assert find_row(lambda p, x: x @ (0.01 * p["w"]), 16, 3).eta == pytest.approx(25.0)


def test_weight_norm_places_gain_and_direction():
    def model(p, x):
        return x @ (p["gain"] * p["v"] / jnp.linalg.norm(p["v"], axis=0))

    params = {"gain": jnp.ones(3), "v": jnp.full((16, 3), 0.5)}
    table = scales_of_function(model, params, X)
    assert not table.unplaced
    # Columns of norm 0.5 * 4 = 2; a unit result needs entries of 1/4 after the division.
    assert table["v"].eta == pytest.approx(0.5)
    assert table["gain"].eta == 1.0


def test_low_rank_update_places_kernel_and_factors():
    def model(p, x):
        return x @ (p["w"] + p["a"] @ p["b"])

    params = {"w": jnp.zeros((16, 3)), "a": jnp.zeros((16, 4)), "b": jnp.zeros((4, 3))}
    table = scales_of_function(model, params, X)
    assert table["w"].eta == pytest.approx(0.25)
    assert table["a"].eta == table["b"].eta == pytest.approx(4**-0.25)


def test_weight_penalty_is_not_a_use():
    def loss(p, x):
        return jnp.mean((x @ p["w"]) ** 2) + 0.1 * jnp.sum(p["w"] ** 2)

    assert find_row(loss, 16, 3).eta == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("fn", "operation"),
    [
        (lambda p, x: jnp.abs(x) ** p["w"], "pow"),
        (lambda p, x: x * jnp.sort(p["w"]), "sort"),
        (lambda p, x: x + jnp.cumsum(p["w"]), "cumsum"),
    ],
)
def test_unplaced_parameter_reports_the_operation_and_gets_its_initial_rms(fn, operation):
    row = find_row(fn, 16, value=3.0)
    assert not row.placed
    assert f"used by {operation!r}" in row.reason
    assert row.eta == pytest.approx(3.0)
