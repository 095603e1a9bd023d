"""The estimate against sums done by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core.sharding_peak import peak_bytes

P = jax.P
SIZES = {"data": 4, "model": 2}
N = 16


def array(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def test_a_value_lives_until_its_last_use():
    def fn(x, w):
        a = x @ w  # One array of N x N,
        b = a @ w  # and another while the first is read,
        return b @ w  # and the result, which is not counted.

    assert peak_bytes(fn, (array(N, N), array(N, N)), (P(), P()), SIZES) == 2 * N * N * 4


def test_rows_and_columns_are_counted_as_one_devices_part():
    def fn(x, w):
        return jnp.sum(jnp.exp(x @ w))

    args, n_bytes = (array(N, N), array(N, N)), N * N * 4
    whole = peak_bytes(fn, args, (P(), P()), SIZES)
    assert whole == 2 * n_bytes
    assert peak_bytes(fn, args, (P("data"), P()), SIZES) == whole // 4
    assert peak_bytes(fn, args, (P("data"), P(None, "model")), SIZES) == whole // 8


def test_what_a_compiler_fuses_is_not_counted():
    def fn(x, w):
        return jnp.sum((x @ w) * 2 + 1)

    assert peak_bytes(fn, (array(N, N), array(N, N)), (P(), P()), SIZES) == N * N * 4


def test_what_does_not_reach_the_result_is_not_counted():
    def fn(x):
        _ = jnp.exp(x @ x @ x)
        return jnp.sum(x)

    assert peak_bytes(fn, (array(N, N),), (P(),), SIZES) == 0


def test_parts_of_a_batch_one_after_the_other_need_the_memory_of_one():
    def held(n_parts):
        def fn(x, w):
            def one(total, part):
                return total + jnp.sum(jnp.exp(part @ w)), None

            parts = jnp.swapaxes(x.reshape(-1, n_parts, N), 0, 1)
            return jax.lax.scan(one, jnp.zeros(()), parts)[0]

        return peak_bytes(fn, (array(64, N), array(N, N)), (P("data"), P()), SIZES)

    assert held(1) == 2 * 64 * N * 4 // 4
    assert held(2) == held(1) // 2


def test_random_numbers_are_split_as_what_they_are_used_with():
    def fn(x):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return jnp.sum(jnp.where(kept, jnp.exp(x), 0))

    args = (array(64, N),)
    assert peak_bytes(fn, args, (P("data"),), SIZES) <= peak_bytes(fn, args, (P(),), SIZES) // 3
