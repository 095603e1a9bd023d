"""The values of the interpreter: data, the parameter it views, and its dependencies.

Data is an array computed from a real batch or, if only shapes are known, `Samples`: some
thousand numbers distributed like the array's entries.
"""

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.optim.scales import views as views_lib

N_SAMPLES = 4096
BATCH = 1  # The bit of `Value.deps` for the batch; parameter i has bit i + 1.


@dataclasses.dataclass(frozen=True)
class Samples:
    """Random samples that stand in for an array of which only shape and dtype are known.

    If one array is computed elementwise from another, sample i of both belongs to the same
    entry, so that `x * x` is a square and not a product of independent numbers.
    """

    samples: np.ndarray


Data = np.ndarray | jax.Array | Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One value of the model.

    Attributes:
        shape: Its shape in the model.
        dtype: Its dtype in the model.
        data: Its entries, or samples of them.
        deps: Bits of the batch and of the parameters it depends on; see `param_bit`.
        views: Where the parameter's axes are, if it is a parameter that was only moved;
            several if parameters were joined or summed.
        product: If it was just multiplied by a parameter: the parameter's view, and the mean
            square and the uses of the other factor.
        gathered: If it is rows that the batch has selected from parameters and that were only
            moved since: where the parameters' axes are.
        uses: Bits of the uses of parameters that it depends on; see `UseRecord`.
        source: The parameters whose contraction it is, up to linear operations.
    """

    shape: tuple[int, ...]
    dtype: Any
    data: Any = None
    deps: int = 0
    views: tuple[views_lib.View, ...] = ()
    product: tuple[views_lib.View, float, int] | None = None
    gathered: tuple[views_lib.View, ...] = ()
    uses: int = 0
    source: tuple[int, ...] = ()

    @property
    def from_batch(self) -> bool:
        """Whether it depends on the batch."""
        return bool(self.deps & BATCH)

    @property
    def from_params(self) -> bool:
        """Whether it has a gradient with respect to some parameter."""
        return self.deps > BATCH

    @property
    def is_weight(self) -> bool:
        """Whether it is computed from parameters alone."""
        return self.from_params and not self.from_batch


def param_bit(param: int) -> int:
    """Returns the bit of a parameter in `Value.deps`."""
    return BATCH << (param + 1)


def mean_square(data: Data, axis: tuple[int, ...] | None = None) -> Any:
    """Averages the squares of finite entries over all axes, or over `axis` with keepdims.

    >>> mean_square(np.array([3.0, -4.0, -np.inf]))
    12.5
    """
    x = np.abs(np.asarray(data.samples if isinstance(data, Samples) else data)).astype(np.float64)
    finite = np.isfinite(x)
    total = np.sum(np.where(finite, x, 0) ** 2, axis=axis, keepdims=axis is not None)
    mean = total / np.maximum(np.sum(finite, axis=axis, keepdims=axis is not None), 1)
    return mean if axis is not None else float(mean)


def unit_samples(dtype: Any, rng: np.random.Generator) -> Samples:
    """Draws samples of unit rms from a normal; for other dtypes, zeros and ones."""
    if jnp.issubdtype(dtype, jnp.inexact):
        samples = rng.permutation(_normal_quantiles())
        return Samples((samples / np.sqrt(np.mean(samples**2))).astype(dtype))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        dtype = np.uint32
    return Samples(rng.permutation(np.arange(N_SAMPLES) % 2).astype(dtype))


def as_samples(data: Data) -> np.ndarray:
    """Draws samples of the entries, at the same positions for arrays of the same size."""
    if isinstance(data, Samples):
        return data.samples
    if jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
        return np.zeros(N_SAMPLES, np.uint32)
    flat = np.asarray(data).reshape(-1)
    if flat.size <= 1:
        return np.full(N_SAMPLES, flat[0] if flat.size else 0, flat.dtype)
    positions = np.arange(N_SAMPLES) * flat.size // N_SAMPLES
    if flat.size < N_SAMPLES:
        positions = np.arange(N_SAMPLES) % flat.size
    return flat[np.random.default_rng(flat.size).permutation(positions)]


def mix(data_and_sizes: list[tuple[Data, int]], rng: np.random.Generator) -> Samples:
    """Mixes samples of several arrays in proportion to their sizes."""
    total = sum(size for _, size in data_and_sizes)
    draws = [
        as_samples(data)[rng.permutation(N_SAMPLES)[: -(-N_SAMPLES * size // total)]]
        for data, size in data_and_sizes
        if size
    ]
    return Samples(rng.permutation(np.concatenate(draws))[:N_SAMPLES])


@functools.cache
def _normal_quantiles() -> np.ndarray:
    quantile = statistics.NormalDist().inv_cdf
    return np.array([quantile((i + 0.5) / N_SAMPLES) for i in range(N_SAMPLES)])
