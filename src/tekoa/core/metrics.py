"""Metrics as sums that stay on the device and are divided when read.

A mean over batches of different sizes is correct only if totals and counts are summed
separately; `Mean` is that pair. `Totals` is the same for metrics that are not means. Metrics of
clu and metrax have the same two methods and can be used as they are.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class Accumulator(Protocol):
    """The value of a metric over some batches: a pytree whose zeros stand for no batch."""

    def merge(self, other: Any) -> Any:
        """Returns the value over the batches of both."""
        ...

    def compute(self) -> Any:
        """Returns the value as a number."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Totals:
    """Totals that add up over batches, and the function that computes a number from them.

    Attributes:
        totals: Arrays by name.
        finish: `finish(**totals)` returns the metric. It runs on the host, with numpy arrays.

    >>> import math
    >>> def perplexity(total, count):
    ...     return math.exp(total / count)
    >>> a = Totals({'total': 2.0, 'count': 1.0}, perplexity)
    >>> round(a.merge(Totals({'total': 0.0, 'count': 1.0}, perplexity)).compute(), 3)
    2.718
    """

    totals: Mapping[str, Any]
    finish: Callable[..., Any] = dataclasses.field(metadata={"static": True})

    def merge(self, other: "Totals") -> "Totals":
        """Returns the totals over the batches of both."""
        return Totals({k: v + other.totals[k] for k, v in self.totals.items()}, self.finish)

    def compute(self) -> Any:
        """Returns the metric."""
        return self.finish(**self.totals)


def as_accumulator(value: Any, n_rows: int, what: str) -> Accumulator:
    """Returns an accumulator unchanged, and converts any other value by `as_mean`."""
    if isinstance(value, Accumulator) and not isinstance(value, Mean):
        return value
    return as_mean(value, n_rows, what)


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


def merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two dicts of means or other accumulators that have the same names."""
    return {name: value.merge(b[name]) for name, value in a.items()}


def zeros(like: Mapping[str, Any]) -> dict[str, Mean]:
    """Creates empty means with the same names."""
    return {name: Mean(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)) for name in like}


def zeros_like(shapes: Mapping[str, Accumulator]) -> dict[str, Any]:
    """Creates empty accumulators with the shapes and dtypes of others."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(shapes))


def compute(means: Mapping[str, Any]) -> dict[str, float]:
    """Copies the metrics to the host as floats; a mean is NaN where the count is zero.

    >>> compute({'loss': Mean(3.0, 2.0), 'none': Mean(0.0, 0.0)})
    {'loss': 1.5, 'none': nan}
    """
    return {name: _as_float(value) for name, value in jax.device_get(dict(means)).items()}


def _as_float(value: Any) -> float:
    if isinstance(value, Mean):
        return float(value.total) / float(value.count) if value.count else float("nan")
    return float(value.compute())
