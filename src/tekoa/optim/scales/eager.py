"""Equations in NumPy.

JAX compiles a program for each operation and shape, which takes longer than everything else in
reading a model. On CPU, where arrays of both share their memory, the operations that most
models consist of are computed by NumPy instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_EXACT = (np.float32, np.float64, np.bool_)  # Short floats would be summed up in their own dtype.
_NumpyRule = Callable[..., Any]  # Of the equation's parameters, and its inputs.


def execute(eqn: Any, data: Sequence[Any]) -> list[Any] | None:
    """Computes an equation in NumPy; None if JAX has to compute it."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or not all(map(_is_plain, data)):
        return None
    with np.errstate(all="ignore"):
        out = rule(eqn.params, *map(np.asarray, data))
    return None if out is None else [np.asarray(out).astype(eqn.outvars[0].aval.dtype, copy=False)]


def as_numpy(x: Any) -> Any:
    """Returns an array of JAX as one of NumPy if `execute` can compute with it."""
    return np.asarray(x) if _is_plain(x) else x


def _is_plain(x: Any) -> bool:
    """Whether it is an array on CPU of a dtype with which NumPy computes as exactly as JAX."""
    if isinstance(x, jax.Array):
        platforms = {device.platform for device in x.sharding.device_set}
        is_here = x.is_fully_addressable and platforms == {"cpu"}
    else:
        is_here = isinstance(x, (np.ndarray, np.generic))
    return is_here and (x.dtype in _EXACT or jnp.issubdtype(x.dtype, np.integer))


def _ufunc(fn: Callable[..., Any]) -> _NumpyRule:
    return lambda params, *data: fn(*data)


def _reduction(fn: Callable[..., Any]) -> _NumpyRule:
    return lambda params, x: fn(x, axis=params["axes"])


def _broadcast_in_dim(params: Any, x: np.ndarray) -> np.ndarray:
    shape = params["shape"]
    lengths = dict(zip(params["broadcast_dimensions"], x.shape, strict=True))
    return np.broadcast_to(x.reshape([lengths.get(i, 1) for i in range(len(shape))]), shape)


def _slice(params: Any, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _select_n(params: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(np.asarray(which, np.intp), cases)


_RULES: dict[str, _NumpyRule] = {
    **{
        name: _ufunc(getattr(np, name))
        for name in ("abs", "exp", "expm1", "log", "log1p", "sign", "sqrt", "square", "tanh")
    },
    "not": _ufunc(np.invert),
    "and": _ufunc(np.bitwise_and),
    "or": _ufunc(np.bitwise_or),
    "add": _ufunc(np.add),
    "sub": _ufunc(np.subtract),
    "mul": _ufunc(np.multiply),
    # In floor_divide, unlike here, negative integers are rounded down.
    "div": lambda params, x, y: x / y if x.dtype.kind == "f" else None,
    "neg": _ufunc(np.negative),
    "max": _ufunc(np.maximum),
    "min": _ufunc(np.minimum),
    "lt": _ufunc(np.less),
    "le": _ufunc(np.less_equal),
    "gt": _ufunc(np.greater),
    "ge": _ufunc(np.greater_equal),
    "eq": _ufunc(np.equal),
    "ne": _ufunc(np.not_equal),
    "is_finite": _ufunc(np.isfinite),
    "logistic": _ufunc(lambda x: 1 / (1 + np.exp(-x))),
    "rsqrt": _ufunc(lambda x: 1 / np.sqrt(x)),
    "integer_pow": lambda params, x: np.power(x, params["y"]),
    "select_n": _select_n,
    "convert_element_type": _ufunc(lambda x: x),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "slice": _slice,
    "concatenate": lambda params, *data: np.concatenate(data, params["dimension"]),
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
}
