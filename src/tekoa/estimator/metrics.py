"""MeanMetrics: a Linen module that gathers means, as model files in the long form use it."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class MeanMetrics(nn.Module):
    """Totals and counts by name, kept in the collection "metrics".

    Attributes:
        names: Names of the metrics.

    >>> made = MeanMetrics.create('train_loss')
    >>> gathered = made.init(jax.random.key(0))
    >>> _, gathered = made.apply(
    ...     gathered, 'train_loss', 6.0, 4.0, method=MeanMetrics.update, mutable=['metrics']
    ... )
    >>> made.apply(gathered)
    {'train_loss': Array(1.5, dtype=float32)}
    """

    names: tuple[str, ...] = ()

    @classmethod
    def create(cls, *names: str) -> "MeanMetrics":
        """Makes a module of these metrics."""
        return cls(names)

    def setup(self):
        """Makes two numbers for each name."""
        zero = lambda: jnp.zeros((), jnp.float32)  # noqa: E731
        self._sums = {
            name: [self.variable("metrics", f"{name}_{part}", zero) for part in ("total", "count")]
            for name in self.names
        }

    def __call__(self, name: str | None = None) -> dict[str, jax.Array] | jax.Array:
        """Gives the mean of one name, or all by name; 0 where nothing was gathered."""
        if name is not None:
            return self._mean(name)
        return {name: self._mean(name) for name in self.names}

    def update(self, name: str, dtotal: jax.typing.ArrayLike, dcount: jax.typing.ArrayLike = 1.0):
        """Adds to the total and the count of a name; gives its mean so far."""
        for gathered, part in zip(self._of(name), (dtotal, dcount), strict=True):
            gathered.value = gathered.value + jnp.asarray(part, jnp.float32)
        return self._mean(name)

    def gathered(self) -> dict[str, jax.Array]:
        """Tells by name whether anything was gathered."""
        return {
            name: (total.value != 0) | (count.value != 0)
            for name, (total, count) in self._sums.items()
        }

    def _mean(self, name: str) -> jax.Array:
        total, count = (part.value for part in self._of(name))
        is_empty = (total == 0) & (count == 0)
        return jnp.where(is_empty, 0.0, total / jnp.where(is_empty, 1.0, count))

    def _of(self, name: str) -> list[nn.Variable]:
        if name not in self._sums:
            raise ValueError(f"There is no metric {name!r}; there are {', '.join(self.names)}.")
        return self._sums[name]
