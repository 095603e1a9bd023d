"""A parameter stays in sight through operations that only move it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim import scale

X = jnp.ones((8, 16))  # Unit rms: a kernel of 16 terms has scale 1/4.


def row(fn, *shape, x=X, dtype=jnp.float32):
    return scale.scales(fn, {"w": jnp.zeros(shape, dtype)}, x)["w"]


@pytest.mark.parametrize(
    ("fn", "shape", "slot_shape"),
    [
        (lambda p, x: x @ p["w"].T, (3, 16), (3, 1)),
        (lambda p, x: x @ p["w"].reshape(16, 6), (4, 4, 6), (1, 1, 6)),
        (lambda p, x: x @ p["w"].reshape(16, 6), (16, 2, 3), (1, 2, 3)),
        (lambda p, x: x @ p["w"][1], (2, 16, 3), (2, 1, 3)),
        (lambda p, x: x @ p["w"][:, ::-1], (16, 3), (1, 3)),
        (lambda p, x: x @ -p["w"].astype(jnp.float32), (16, 3), (1, 3)),
        (lambda p, x: x @ p["w"].squeeze(1), (16, 1, 3), (1, 1, 3)),
        (lambda p, x: x @ jnp.split(p["w"], 3, axis=1)[0], (16, 9), (1, 9)),
        (lambda p, x: x @ jnp.concatenate([p["w"], p["w"]], 1), (16, 3), (1, 3)),
        (lambda p, x: x @ jnp.pad(p["w"], ((0, 0), (1, 1))), (16, 3), (1, 3)),
        (lambda p, x: jnp.einsum("bi,oi->bo", x, p["w"]), (3, 16), (3, 1)),
        (lambda p, x: x @ jnp.clip(p["w"], -1, 1), (16, 3), (1, 3)),
        (lambda p, x: x @ jnp.abs(p["w"]), (16, 3), (1, 3)),
        (lambda p, x: x @ jnp.where(np.tri(16, 3) == 1, p["w"], 0), (16, 3), (1, 3)),
        (
            lambda p, x: x @ (p["w"] + jax.lax.stop_gradient(jnp.round(p["w"]) - p["w"])),
            (16, 3),
            (1, 3),
        ),
        (lambda p, x: x @ jax.lax.optimization_barrier(p["w"]), (16, 3), (1, 3)),
    ],
)
def test_kernel_is_followed_through(fn, shape, slot_shape):
    found = row(fn, *shape)
    assert found.placed
    assert found.eta == pytest.approx(0.25)
    assert found.slot_shape == slot_shape


def test_half_precision_kernel_is_followed_through_casts():
    found = row(lambda p, x: x @ p["w"].astype(jnp.float32), 16, 3, dtype=jnp.bfloat16)
    assert found.eta == pytest.approx(0.25)


def test_kernels_joined_along_the_contracted_axis_share_their_terms():
    params = {"a": jnp.zeros((12, 3)), "b": jnp.zeros((4, 3))}
    table = scale.scales(lambda p, x: x @ jnp.concatenate([p["a"], p["b"]]), params, X)
    assert [found.eta for found in table] == pytest.approx([0.25, 0.25])
    assert [found.slot_shape for found in table] == [(1, 3), (1, 3)]


def test_slice_by_a_loop_counter_is_a_layer_and_by_the_batch_a_row():
    params = {"w": jnp.zeros((5, 16))}
    layer = scale.scales(lambda p, x: x * p["w"][jnp.arange(5)[2]], params, X)["w"]
    by_batch = scale.scales(lambda p, i: p["w"][i], params, jnp.int32(3))["w"]
    assert by_batch.reason.startswith("looked up")
    assert layer.slot_shape == by_batch.slot_shape == (5, 1)


def test_stop_gradient_leaves_nothing_to_learn():
    params = {"w": jnp.full((16, 3), 2.0), "v": jnp.zeros((16, 3))}
    fn = lambda p, x: x @ jax.lax.stop_gradient(p["w"]) + x @ p["v"]
    found = scale.scales(fn, params, X)["w"]
    assert not found.placed
    assert "stop_gradient" in found.reason
    assert found.eta == pytest.approx(2.0)


def test_lost_parameter_is_told_with_the_operation():
    found = row(lambda p, x: x @ p["w"].reshape(16, 3), 12, 4)
    assert not found.placed
    assert "lost sight of in 'reshape'" in found.reason
