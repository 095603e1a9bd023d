"""What the interpreter carries for each value of the model: data, origin, dependence.

Data is the array itself where a real batch gave one. Where only shapes are known it is a
`Bag`: some thousand numbers distributed as the entries are thought to be.
"""

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.optim import scale_views

N_SAMPLES = 4096
BATCH = 1  # The bit of `Value.deps` for the batch; parameter i has bit i + 1.


@dataclasses.dataclass(frozen=True)
class Bag:
    """Entries of an array that is not there, drawn at places that no one knows.

    Sample i of two bags is at the same place where one was computed from the other entry
    by entry, so `x * x` is a square and not a product of strangers.
    """

    samples: np.ndarray


Data = np.ndarray | jax.Array | Bag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One value of the model.

    While `views` is not empty the value is those parameters, merely moved about (several
    when they are joined or summed), and has no data.
    """

    shape: tuple[int, ...]
    dtype: Any
    data: Any = None
    deps: int = 0
    views: tuple[scale_views.View, ...] = ()
    product: tuple[scale_views.View, float] | None = None  # Just multiplied: by data of this ms.
    source: tuple[int, ...] = ()  # The parameters whose contraction it is, up to linear steps.

    @property
    def from_batch(self) -> bool:
        """Whether it depends on the batch."""
        return bool(self.deps & BATCH)

    @property
    def from_params(self) -> bool:
        """Whether a gradient can go from it to some parameter."""
        return self.deps > BATCH


def param_bit(param: int) -> int:
    """The bit that stands for a parameter in `Value.deps`."""
    return BATCH << (param + 1)


def mean_square(data: Data, axis: tuple[int, ...] | None = None) -> Any:
    """Averages the squares of the finite entries, over `axis` (kept at size 1) or all.

    >>> mean_square(np.array([3.0, -4.0, -np.inf]))
    12.5
    """
    x = np.abs(np.asarray(data.samples if isinstance(data, Bag) else data)).astype(np.float64)
    finite = np.isfinite(x)
    total = np.sum(np.where(finite, x, 0) ** 2, axis=axis, keepdims=axis is not None)
    mean = total / np.maximum(np.sum(finite, axis=axis, keepdims=axis is not None), 1)
    return mean if axis is not None else float(mean)


def unit_bag(dtype: Any, rng: np.random.Generator) -> Bag:
    """Makes a bag of unit rms: a normal one, or coins for integers and booleans."""
    if jnp.issubdtype(dtype, jnp.inexact):
        samples = rng.permutation(_normal_quantiles())
        return Bag((samples / np.sqrt(np.mean(samples**2))).astype(dtype))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        dtype = np.uint32
    return Bag(rng.permutation(np.arange(N_SAMPLES) % 2).astype(dtype))


def as_samples(data: Data) -> np.ndarray:
    """Draws from the entries; arrays of one size are drawn from at the same places."""
    if isinstance(data, Bag):
        return data.samples
    if jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
        return np.zeros(N_SAMPLES, np.uint32)
    flat = np.asarray(data).reshape(-1)
    if flat.size <= 1:
        return np.full(N_SAMPLES, flat[0] if flat.size else 0, flat.dtype)
    places = np.arange(N_SAMPLES) * flat.size // N_SAMPLES
    if flat.size < N_SAMPLES:
        places = np.arange(N_SAMPLES) % flat.size
    return flat[np.random.default_rng(flat.size).permutation(places)]


def mixed(parts: list[tuple[Data, int]], rng: np.random.Generator) -> Bag:
    """Mixes the entries of several arrays, each by its size."""
    total = sum(size for _, size in parts)
    drawn = [
        as_samples(data)[rng.permutation(N_SAMPLES)[: -(-N_SAMPLES * size // total)]]
        for data, size in parts
        if size
    ]
    return Bag(rng.permutation(np.concatenate(drawn))[:N_SAMPLES])


@functools.cache
def _normal_quantiles() -> np.ndarray:
    quantile = statistics.NormalDist().inv_cdf
    return np.array([quantile((i + 0.5) / N_SAMPLES) for i in range(N_SAMPLES)])
