"""Keys, one after another."""

import numbers
from collections.abc import Iterator

import jax


def sequence(seed: int | jax.Array) -> Iterator[jax.Array]:
    """Yields keys that all differ, from a seed or a key.

    >>> keys = sequence(0)
    >>> bool((jax.random.key_data(next(keys)) == jax.random.key_data(next(keys))).all())
    False
    """
    key = jax.random.key(seed) if isinstance(seed, numbers.Integral) else seed
    i = 0
    while True:
        yield jax.random.fold_in(key, i)
        i += 1
