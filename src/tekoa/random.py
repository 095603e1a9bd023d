"""Sequences of PRNG keys."""

import itertools
import numbers
from collections.abc import Iterator

import jax


def sequence(seed: int | jax.Array) -> Iterator[jax.Array]:
    """Returns an endless iterator of distinct PRNG keys derived from a seed or a key.

    >>> keys = sequence(0)
    >>> bool((jax.random.key_data(next(keys)) == jax.random.key_data(next(keys))).all())
    False
    """
    key = jax.random.key(seed) if isinstance(seed, numbers.Integral) else seed
    return (jax.random.fold_in(key, i) for i in itertools.count())
