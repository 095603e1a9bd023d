import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.core.update.gradients import shape_gradients

GRADS = {"w": jnp.float32([[3.0, 4.0]]), "b": jnp.zeros(2, jnp.bfloat16)}


def test_large_gradients_are_scaled_down_and_small_ones_stay():
    clipped = shape_gradients(GRADS, jax.random.key(0), clip_norm=2.5)
    np.testing.assert_allclose(clipped["w"], [[1.5, 2.0]], rtol=1e-6)
    assert clipped["b"].dtype == jnp.bfloat16
    same = shape_gradients(GRADS, jax.random.key(0), clip_norm=6.0)
    np.testing.assert_array_equal(same["w"], GRADS["w"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_noise_has_its_deviation_and_depends_on_the_key_alone(dtype):
    zeros = {"a": jnp.zeros(4000, dtype), "b": jnp.zeros(4000, dtype)}
    first, again, other = (
        shape_gradients(zeros, jax.random.key(seed), noise=0.5) for seed in (1, 1, 2)
    )
    for name in zeros:
        assert np.float32(first[name]).std() == pytest.approx(0.5, rel=0.1)
        np.testing.assert_array_equal(first[name], again[name])
        assert np.any(first[name] != other[name])
    assert np.any(first["a"] != first["b"])
