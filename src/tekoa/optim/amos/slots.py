"""The slots of Amos: each parameter's scale, its slot shape, and the mean square it stores."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import rules, trees

_N_SLABS = 8
_MIN_SIZE = 2**16


def eta_of(eta_fn: rules.ParamsFn, name: trees.Name, shape: tuple[int, ...]) -> Any:
    """Returns the scale of a parameter as a numpy array that broadcasts to it.

    Raises:
        ValueError: If it does not broadcast, or is negative, NaN or Inf.

    >>> eta_of(lambda name, shape: 0.5, ('w',), (2, 3))
    array(0.5)
    """
    with jax.ensure_compile_time_eval():  # eta_fn may use jnp, even under jit.
        eta = np.asarray(eta_fn(name, shape))
    values = eta.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(
            f"The scale (eta) of {'/'.join(name)!r} of shape {shape} must be finite and not "
            f"negative, got {eta}."
        )
    if not _broadcasts(values.shape, shape):
        raise ValueError(
            f"The scale (eta) of {'/'.join(name)!r} has shape {values.shape}, which does not "
            f"broadcast to the parameter's shape {shape}."
        )
    return eta


def slot_shape_of(
    shape_fn: rules.ParamsFn | None, name: trees.Name, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the shape of a parameter's slots; without `shape_fn`, the parameter's own.

    Raises:
        ValueError: If the shape does not broadcast to the parameter's.

    >>> slot_shape_of(lambda name, shape: (1, *shape[1:]), ('w',), (2, 3))
    (1, 3)
    """
    if shape_fn is None:
        return shape
    requested = shape_fn(name, shape)
    slot_shape = tuple(requested) if isinstance(requested, (tuple, list)) else None
    if slot_shape is None or not _broadcasts(slot_shape, shape):
        raise ValueError(
            f"The slot shape of {'/'.join(name)!r} must broadcast to the parameter's shape {shape} "
            f"(same axes or 1, or () for a scalar), got {requested!r}."
        )
    return slot_shape


def _broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    if len(small) > len(large):
        return False
    return all(m in (1, n) for m, n in zip(small[::-1], large[::-1]))


def mean_of_squares(x: jax.Array, slot_shape: tuple[int, ...]) -> jax.Array:
    """Averages squares over the axes that the slot lacks or has at size 1.

    >>> mean_of_squares(jnp.array([[1.0, 2.0], [3.0, 4.0]]), (1, 2))
    Array([[ 5., 10.]], dtype=float32)
    """
    aligned = (1,) * (x.ndim - len(slot_shape)) + slot_shape
    axes = [i for i, (n, m) in enumerate(zip(x.shape, aligned)) if m == 1 and n != 1]
    if axes == [0] and has_slow_reductions(x):
        return _mean_by_slabs(x).reshape(slot_shape)
    squares = jnp.square(x)
    mean = jnp.mean(squares, axis=tuple(axes), keepdims=True) if axes else squares
    return mean.reshape(slot_shape)


def has_slow_reductions(x: Any) -> bool:
    """Whether the mean over the first axis of an array is computed by slabs."""
    # With several devices, slabs may be on different ones.
    return jax.default_backend() == "cpu" and jax.device_count() == 1 and is_large(x)


def is_large(x: Any) -> bool:
    """Whether an array, or its shape, can be reduced by slabs, and is large enough to gain."""
    return x.ndim > 1 and x.shape[0] % _N_SLABS == 0 and x.size >= _MIN_SIZE


def _mean_by_slabs(x: jax.Array) -> jax.Array:
    """Averages squares over the first axis, adding slabs of it before summing the rest.

    On CPU, XLA adds slabs at memory speed but reduces a first axis at less than half of it.
    The rest is summed by a matrix product, because XLA would fuse a reduction with the slabs.
    """
    n = x.shape[0]
    slabs = x.reshape(_N_SLABS, n // _N_SLABS, *x.shape[1:])
    sums = [jnp.square(slabs[i]) for i in range(_N_SLABS)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    rows = sums[0].reshape(n // _N_SLABS, math.prod(x.shape[1:]))
    weights = jnp.full(n // _N_SLABS, 1 / n, x.dtype)
    return jnp.matmul(weights, rows, precision="highest").reshape(x.shape[1:])
