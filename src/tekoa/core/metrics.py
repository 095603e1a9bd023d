"""Metrics as sums that stay on the device and are divided when read.

A mean over batches of different sizes is correct only if totals and counts are summed
separately; `Mean` is that pair.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Mean(NamedTuple):
    """A total and the count to divide it by.

    >>> a, b = Mean(6.0, 3.0), Mean(2.0, 1.0)
    >>> a.merge(b).compute()
    2.0
    """

    total: Any
    count: Any

    def merge(self, other: "Mean") -> "Mean":
        """Returns the mean over the values of both."""
        return Mean(self.total + other.total, self.count + other.count)

    def compute(self) -> Any:
        """Returns the total divided by the count; NaN if the count is zero."""
        return self.total / self.count


def as_mean(value: Any, n_rows: int, what: str) -> Mean:
    """Converts the value of a metric or a loss to a `Mean`.

    Args:
        value: A `Mean`, a scalar mean over the batch, or one value per row.
        n_rows: The number of rows, which is the weight of a scalar.
        what: The name of the metric, for messages.

    Raises:
        TypeError: If the value is none of these.

    >>> as_mean(jnp.float32([1.0, 3.0]), 2, 'error').compute()
    Array(2., dtype=float32)
    """
    if isinstance(value, Mean):
        return Mean(_scalar(value.total, what), _scalar(value.count, what))
    kind = type(value).__name__
    if hasattr(value, "dtype") or isinstance(value, (int, float)):
        x = jnp.asarray(value)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if x.shape in ((), (n_rows,)):
            total = jnp.sum(x) if x.shape else x * n_rows
            return Mean(total, jnp.asarray(n_rows, jnp.float32))
        kind = f"an array of shape {x.shape}"
    raise TypeError(
        f"{what} must return a number, one number per row ({n_rows},), or a Mean(total, count), "
        f"got {kind}."
    )


def _scalar(x: Any, what: str) -> jax.Array:
    if jnp.shape(x) != ():
        raise TypeError(f"{what} returned a Mean whose fields have shape {jnp.shape(x)}, not ().")
    return jnp.asarray(x, jnp.float32)


def merge(a: Mapping[str, Mean], b: Mapping[str, Mean]) -> dict[str, Mean]:
    """Merges two dicts of means that have the same names."""
    return {name: mean.merge(b[name]) for name, mean in a.items()}


def zeros(like: Mapping[str, Any]) -> dict[str, Mean]:
    """Creates empty means with the same names."""
    return {name: Mean(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)) for name in like}


def compute(means: Mapping[str, Mean]) -> dict[str, float]:
    """Copies the means to the host as floats; NaN where the count is zero.

    >>> compute({'loss': Mean(3.0, 2.0), 'none': Mean(0.0, 0.0)})
    {'loss': 1.5, 'none': nan}
    """
    return {
        name: float(mean.total) / float(mean.count) if mean.count else float("nan")
        for name, mean in jax.device_get(dict(means)).items()
    }
