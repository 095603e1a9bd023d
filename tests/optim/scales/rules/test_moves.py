"""Parameters are followed through operations that only move their entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales.auto import scales_of_function

X = jnp.ones((8, 16))  # Unit rms: a kernel of 16 terms has scale 1/4.


def row(fn, *shape, x=X, dtype=jnp.float32):
    return scales_of_function(fn, {"w": jnp.zeros(shape, dtype)}, x)["w"]


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
    kernel = row(fn, *shape)
    assert kernel.placed
    assert kernel.eta == pytest.approx(0.25)
    assert kernel.slot_shape == slot_shape


def test_half_precision_kernel_is_followed_through_casts():
    kernel = row(lambda p, x: x @ p["w"].astype(jnp.float32), 16, 3, dtype=jnp.bfloat16)
    assert kernel.eta == pytest.approx(0.25)


def test_kernels_joined_along_the_contracted_axis_share_their_terms():
    params = {"a": jnp.zeros((12, 3)), "b": jnp.zeros((4, 3))}
    table = scales_of_function(lambda p, x: x @ jnp.concatenate([p["a"], p["b"]]), params, X)
    assert [kernel.eta for kernel in table] == pytest.approx([0.25, 0.25])
    assert [kernel.slot_shape for kernel in table] == [(1, 3), (1, 3)]


def test_index_from_a_loop_selects_a_layer_and_from_the_batch_a_row():
    params = {"w": jnp.zeros((5, 16))}
    layer = scales_of_function(lambda p, x: x * p["w"][jnp.arange(5)[2]], params, X)["w"]
    by_batch = scales_of_function(lambda p, i: p["w"][i], params, jnp.int32(3))["w"]
    assert by_batch.reason.startswith("looked up")
    assert layer.slot_shape == by_batch.slot_shape == (5, 1)


def test_parameter_behind_stop_gradient_is_not_placed():
    params = {"w": jnp.full((16, 3), 2.0), "v": jnp.zeros((16, 3))}
    fn = lambda p, x: x @ jax.lax.stop_gradient(p["w"]) + x @ p["v"]
    kernel = scales_of_function(fn, params, X)["w"]
    assert not kernel.placed
    assert "stop_gradient" in kernel.reason
    assert kernel.eta == pytest.approx(2.0)


def test_parameter_that_cannot_be_followed_is_reported_with_the_operation():
    kernel = row(lambda p, x: x @ p["w"].reshape(16, 3), 12, 4)
    assert not kernel.placed
    assert "no longer traceable after 'reshape'" in kernel.reason
