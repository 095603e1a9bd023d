"""Contractions of every shape, against 1 / (rms * sqrt(terms))."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales.auto import scales_of_function

X = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], (32, 16)), jnp.float32)  # Unit rms.


def find(fn, x=X, **shapes):
    return scales_of_function(fn, {name: jnp.zeros(shape) for name, shape in shapes.items()}, x)


def test_dense_layer_compensates_the_rms_of_its_input():
    assert find(lambda p, x: 3 * x @ p["w"], w=(16, 5))["w"].eta == pytest.approx(1 / 12)


def test_the_result_has_unit_rms_afterwards():
    table = find(lambda p, x: (x @ p["w"]) @ p["v"], w=(16, 9), v=(9, 2))
    assert table["v"].eta == pytest.approx(1 / 3)


def test_relu_halves_the_mean_square():
    table = find(lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"], w=(16, 32), v=(32, 2))
    assert table["v"].eta == pytest.approx(0.25, rel=1e-3)  # 1 / sqrt(32 / 2)


@pytest.mark.parametrize(
    ("formula", "shape", "eta", "slot_shape"),
    [
        ("bi,ihd->bhd", (16, 2, 4), 0.25, (1, 2, 4)),
        ("bi,hid->bhd", (2, 16, 4), 0.25, (2, 1, 4)),
        ("bi,i->b", (16,), 0.25, ()),
        ("bi,oi->bo", (3, 16), 0.25, (3, 1)),
    ],
)
def test_einsum(formula, shape, eta, slot_shape):
    row = find(lambda p, x: jnp.einsum(formula, x, p["w"]), w=shape)["w"]
    assert (row.eta, row.slot_shape) == (pytest.approx(eta), slot_shape)


def test_einsum_over_two_axes():
    table = find(lambda p, x: jnp.einsum("bhd,hdo->bo", x.reshape(32, 2, 8), p["w"]), w=(2, 8, 3))
    assert (table["w"].eta, table["w"].slot_shape) == (pytest.approx(0.25), (1, 1, 3))


def test_multiplying_and_summing_is_a_contraction():
    row = find(lambda p, x: (x * p["w"]).sum(-1), w=(16,))["w"]
    assert (row.eta, row.slot_shape) == (pytest.approx(0.25), ())


def test_summing_a_loss_is_not_a_contraction():
    assert find(lambda p, x: (x * p["w"]).sum(), w=(16,))["w"].eta == 1.0


def test_experts_behind_a_one_hot_dispatch_see_their_own_tokens():
    def model(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        dispatch = jax.nn.one_hot(gates.argmax(-1), 4)
        tokens = jnp.einsum("be,bd->ebd", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("ebd,edh->ebh", tokens, p["wide"]))
        out = jnp.einsum("ebh,ehd->ebd", hidden, p["narrow"])
        return jnp.einsum("ebd,be->bd", out, dispatch * gates)

    table = find(model, router=(16, 4), wide=(4, 16, 64), narrow=(4, 64, 16))
    assert table["router"].eta == table["wide"].eta == pytest.approx(0.25)
    assert table["narrow"].eta == pytest.approx((64 / 2) ** -0.5, rel=0.02)
    assert table["wide"].slot_shape == (4, 1, 64)


def test_ragged_dot_has_one_slot_per_group():
    sizes = jnp.array([12, 20], jnp.int32)
    row = find(lambda p, x: jax.lax.ragged_dot(x, p["w"], sizes), w=(2, 16, 5))["w"]
    assert (row.eta, row.slot_shape) == (pytest.approx(0.25), (2, 1, 5))


def test_attention_keeps_the_scale_of_its_values():
    def model(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        return jax.nn.softmax(q @ k.T / 3) @ v @ p["out"]

    table = find(model, qkv=(16, 27), out=(9, 4))
    assert table["qkv"].slot_shape == (1, 27)
    assert table["out"].eta == pytest.approx(1 / 3, rel=0.1)


@pytest.mark.parametrize("shapes_only", [False, True])
def test_complex_kernel_of_a_fourier_layer(shapes_only):
    def model(p, x):
        return jnp.fft.irfft(jnp.fft.rfft(x, axis=0).astype(jnp.complex64) @ p["w"], axis=0)

    x = jax.ShapeDtypeStruct(X.shape, X.dtype) if shapes_only else X
    row = scales_of_function(model, {"w": jnp.zeros((16, 3), jnp.complex64)}, x)["w"]
    assert row.placed
    assert row.slot_shape == (1, 3)


def test_padding_rows_do_not_count():
    padded = jnp.concatenate([X, jnp.zeros_like(X)])
    assert find(lambda p, x: x @ p["w"], x=padded, w=(16, 3))["w"].eta == pytest.approx(0.25)


def test_two_uses_of_a_parameter_are_pooled():
    # Mean squares 1 and 7 have the mean 4.
    fn = lambda p, x: x @ p["w"] + (7**0.5 * x) @ p["w"]
    assert find(fn, w=(16, 3))["w"].eta == pytest.approx(1 / 8)


def test_kernel_that_is_also_used_transposed_gets_the_smaller_scale():
    row = find(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, w=(16, 64))["w"]
    assert row.eta == pytest.approx(64**-0.5 / 0.63, rel=0.05)  # rms of tanh(normal): 0.63.
    assert row.slot_shape == (16, 1)
    assert "also contracted (0.25)" in row.reason


def test_members_of_an_ensemble_get_the_scales_of_one_model():
    def model(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

    single = find(model, w=(16, 64), b=(64,), v=(64, 2))
    ensemble = find(jax.vmap(model, (0, None)), w=(3, 16, 64), b=(3, 64), v=(3, 64, 2))
    assert [row.eta for row in ensemble] == pytest.approx([row.eta for row in single], rel=0.03)
    assert [row.slot_shape for row in ensemble] == [(3, 1), (3, 1, 2), (3, 1, 64)]


def test_ensemble_of_convolutions():
    def model(p, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=dims)

    row = find(jax.vmap(model, (0, None)), x=jnp.ones((2, 8, 8, 4)), k=(5, 3, 3, 4, 6))["k"]
    assert (row.eta, row.slot_shape) == (pytest.approx(1 / 6), (5, 1, 1, 1, 6))


def test_kernel_contracted_only_with_zeros_is_reported():
    row = find(lambda p, x: (0 * x) @ p["w"] + x[:, :3] * p["s"], w=(16, 3), s=(3,))["w"]
    assert not row.placed
    assert "contracted only with data that is zero" in row.reason


def test_tied_embedding_shares_its_scale_with_a_neighbouring_output():
    # As in the LSTM published with Amos: rows and recurrent output have rms h**-1/4.
    h = 64

    def model(p, ids):
        def cell(recurrent, x):
            out = jnp.concatenate([recurrent, x], -1) @ p["core"]
            return (out := jnp.tanh(out) @ p["out"] + p["bias"]), out

        x = p["embedding"][ids].swapaxes(0, 1)
        _, outs = jax.lax.scan(cell, jnp.zeros((8, h)), x)
        return outs @ p["embedding"].T

    ids = np.random.default_rng(0).integers(0, 50, (8, 12))
    table = find(model, x=ids, embedding=(50, h), core=(2 * h, 32), out=(32, h), bias=(h,))
    assert table["embedding"].eta == pytest.approx(h**-0.25, rel=0.02)
    assert table["bias"].eta == pytest.approx(0.5 * h**-0.25, rel=0.02)
    assert "tied" in table["embedding"].reason
    assert "that of a tied embedding" in table["out"].reason
