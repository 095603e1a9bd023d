"""Compares the estimate with numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.sharding.memory import peak_bytes

P = jax.P
SIZES = {"data": 4, "model": 2}
N = 16


def array(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def test_a_value_is_alive_until_its_last_use():
    def fn(x, w):
        a = x @ w  # One array of N x N,
        b = a @ w  # and another while the first is read,
        return b @ w  # and the result, which is not counted.

    assert peak_bytes(fn, (array(N, N), array(N, N)), (P(), P()), SIZES) == 2 * N * N * 4


def test_sharded_values_count_with_the_size_of_one_shard():
    def fn(x, w):
        return jnp.sum(jnp.exp(x @ w))

    args, n_bytes = (array(N, N), array(N, N)), N * N * 4
    whole = peak_bytes(fn, args, (P(), P()), SIZES)
    assert whole == 2 * n_bytes
    assert peak_bytes(fn, args, (P("data"), P()), SIZES) == whole // 4
    assert peak_bytes(fn, args, (P("data"), P(None, "model")), SIZES) == whole // 8


def test_fused_operations_are_not_counted():
    def fn(x, w):
        return jnp.sum((x @ w) * 2 + 1)

    assert peak_bytes(fn, (array(N, N), array(N, N)), (P(), P()), SIZES) == N * N * 4


def test_unused_values_are_not_counted():
    def fn(x):
        _ = jnp.exp(x @ x @ x)
        return jnp.sum(x)

    assert peak_bytes(fn, (array(N, N),), (P(),), SIZES) == 0


def test_a_scan_over_microbatches_needs_the_memory_of_one():
    def peak(n_parts):
        def fn(x, w):
            def one(total, part):
                return total + jnp.sum(jnp.exp(part @ w)), None

            parts = jnp.swapaxes(x.reshape(-1, n_parts, N), 0, 1)
            return jax.lax.scan(one, jnp.zeros(()), parts)[0]

        return peak_bytes(fn, (array(64, N), array(N, N)), (P("data"), P()), SIZES)

    assert peak(1) == 2 * 64 * N * 4 // 4
    assert peak(2) == peak(1) // 2


def test_random_numbers_are_split_like_the_values_used_with_them():
    def fn(x):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return jnp.sum(jnp.where(kept, jnp.exp(x), 0))

    args = (array(64, N),)
    assert peak_bytes(fn, args, (P("data"),), SIZES) <= peak_bytes(fn, args, (P(),), SIZES) // 3
