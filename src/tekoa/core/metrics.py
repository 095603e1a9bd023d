"""Sums that stay on the device, merge exactly, and become a mean when read.

A mean over batches of different sizes is right only if totals and counts travel
separately; `Mean` is that pair.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Mean(NamedTuple):
    """A total and the weight it is to be divided by.

    >>> a, b = Mean(6.0, 3.0), Mean(2.0, 1.0)
    >>> a.merge(b).compute()
    2.0
    """

    total: Any
    count: Any

    def merge(self, other: "Mean") -> "Mean":
        """Gives the mean over both."""
        return Mean(self.total + other.total, self.count + other.count)

    def compute(self) -> Any:
        """Divides; gives NaN where nothing was counted."""
        return self.total / self.count


def as_mean(value: Any, n_rows: int, what: str) -> Mean:
    """Takes a `Mean`, a scalar mean over the batch, or one value per row.

    Args:
        value: What a metric or a loss gave.
        n_rows: The size of the batch, the weight of a scalar.
        what: The name for the message.

    Raises:
        TypeError: If the value is none of these.

    >>> as_mean(jnp.float32([1.0, 3.0]), 2, 'error').compute()
    Array(2., dtype=float32)
    """
    if isinstance(value, Mean):
        return Mean(_scalar(value.total, what), _scalar(value.count, what))
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise TypeError(
            f"{what} must give a number, one number per row, or a Mean(total, count), "
            f"got {type(value).__name__}."
        )
    shape = jnp.shape(value)
    value = jnp.asarray(value)
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if shape == ():
        return Mean(value * n_rows, jnp.asarray(n_rows, jnp.float32))
    if shape == (n_rows,):
        return Mean(jnp.sum(value), jnp.asarray(n_rows, jnp.float32))
    raise TypeError(
        f"{what} must give a number, one number per row ({n_rows},), or a Mean(total, count), "
        f"got an array of shape {shape}."
    )


def _scalar(x: Any, what: str) -> jax.Array:
    if jnp.shape(x) != ():
        raise TypeError(f"{what} gave a Mean whose fields have shape {jnp.shape(x)}, not ().")
    return jnp.asarray(x, jnp.float32)


def merge(a: Mapping[str, Mean], b: Mapping[str, Mean]) -> dict[str, Mean]:
    """Merges two sets of the same means."""
    return {name: mean.merge(b[name]) for name, mean in a.items()}


def zeros(like: Mapping[str, Any]) -> dict[str, Mean]:
    """Makes empty means of the same names."""
    return {name: Mean(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)) for name in like}


def compute(means: Mapping[str, Mean]) -> dict[str, float]:
    """Reads the means off the device; NaN where nothing was counted.

    >>> compute({'loss': Mean(3.0, 2.0), 'none': Mean(0.0, 0.0)})
    {'loss': 1.5, 'none': nan}
    """
    read = jax.device_get(dict(means))
    return {
        name: float(mean.total) / float(mean.count) if mean.count else float("nan")
        for name, mean in read.items()
    }
