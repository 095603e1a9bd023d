"""Means of squares over some axes, which is all that reduced slots need of a gradient."""

import math

import jax
import jax.numpy as jnp

_N_SLABS = 8
_MIN_SIZE = 2**16


def mean_of_squares(x: jax.Array, slot_shape: tuple[int, ...]) -> jax.Array:
    """Averages the squares over the axes that the slot does not have, or has at size 1.

    >>> mean_of_squares(jnp.array([[1.0, 2.0], [3.0, 4.0]]), (1, 2))
    Array([[ 5., 10.]], dtype=float32)
    """
    aligned = (1,) * (x.ndim - len(slot_shape)) + slot_shape
    axes = [i for i, (n, m) in enumerate(zip(x.shape, aligned)) if m == 1 and n != 1]
    if axes == [0] and _has_slow_reductions(x):
        return _mean_by_slabs(x).reshape(slot_shape)
    squares = jnp.square(x)
    mean = jnp.mean(squares, axis=tuple(axes), keepdims=True) if axes else squares
    return mean.reshape(slot_shape)


def _has_slow_reductions(x: jax.Array) -> bool:
    # Over several devices a slab may lie on another one.
    is_alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    return is_alone and x.ndim > 1 and x.shape[0] % _N_SLABS == 0 and x.size >= _MIN_SIZE


def _mean_by_slabs(x: jax.Array) -> jax.Array:
    """Averages squares over the first axis, adding up slabs of it before the rest.

    XLA on CPU adds slabs as fast as memory gives them, but reduces a first axis at less than
    half that speed. A product sums up the rest: a reduction would take the slabs apart again.
    """
    n = x.shape[0]
    slabs = x.reshape(_N_SLABS, n // _N_SLABS, *x.shape[1:])
    parts = [jnp.square(slabs[i]) for i in range(_N_SLABS)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    rest = parts[0].reshape(n // _N_SLABS, math.prod(x.shape[1:]))
    weights = jnp.full(n // _N_SLABS, 1 / n, x.dtype)
    return jnp.matmul(weights, rest, precision="highest").reshape(x.shape[1:])
