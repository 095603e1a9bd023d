"""Shuffled order as a pure function: the k-th of n items for a key, independent of other k.

A short permutation is a table, sorted by keyed hashes. A long one is never stored: a
Feistel network over the rectangle `left_size x right_size` maps each position by itself, and
is applied again to positions that land outside `n` (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002). Its round functions are tables of sqrt(n) hashes. Only
integer arithmetic of fixed width is used, so the order is the same on every machine and with
every version of numpy.
"""

import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

Key = tuple[int, ...]

# Up to this size a table is cheap, and it is an unbiased shuffle.
MAX_TABLE = 4096
# With 4 rounds, distances of neighbours are visibly uneven; with 6 they are not.
N_ROUNDS = 6
_MASK = 2**64 - 1


def permute(positions: np.ndarray, n: int, key: Key) -> np.ndarray:
    """Returns the item at each position of a shuffle of `range(n)`.

    Args:
        positions: Integers in [0, n), of any shape and order.
        n: Number of items to shuffle.
        key: Integers that select the shuffle, such as (seed, epoch).

    Returns:
        Items in [0, n) as int64; each item belongs to exactly one position.

    >>> np.sort(permute(np.arange(5), 5, (7, 0)))
    array([0, 1, 2, 3, 4])
    """
    if n <= MAX_TABLE:
        return _table(n, key)[positions]
    left_size, right_size, rounds = _rounds(n, key)
    items = _feistel(positions.ravel(), left_size, right_size, rounds)
    outside = np.flatnonzero(items >= n)
    while outside.size:
        items[outside] = _feistel(items[outside], left_size, right_size, rounds)
        outside = outside[items[outside] >= n]
    return items.reshape(positions.shape)


def below(limit: int, key: Key) -> int:
    """Returns a pseudorandom integer in [0, limit) that depends only on the key.

    >>> 0 <= below(64, (7, 0)) < 64
    True
    """
    return int(_hashes(1, key)[0]) % limit


def generator(key: Key) -> np.random.Generator:
    """Creates a numpy generator for a key.

    >>> generator((1, 2)).integers(100) == generator((1, 2)).integers(100)
    np.True_
    """
    return np.random.Generator(np.random.Philox(key=_hash_key(key)))


def generators(keys: Iterable[Key]) -> Iterator[np.random.Generator]:
    """Yields the generator of each key; each is valid until the next one.

    It is one object with a new state every time, which takes a fifth of the time of a new one.

    >>> [int(rng.integers(100)) for rng in generators([(1, 2), (3, 4)])] == [
    ...     int(generator(key).integers(100)) for key in [(1, 2), (3, 4)]]
    True
    """
    bits = np.random.Philox(key=0)
    start, rng = bits.state, np.random.Generator(bits)
    for key in keys:
        start["state"]["key"][0] = _hash_key(key)
        bits.state = start
        yield rng


def _hash_key(key: Key) -> int:
    """Hashes the numbers of a key to 64 bits."""
    mixed = 0x9E3779B97F4A7C15
    for word in key:
        mixed = _mix((mixed ^ (word & _MASK)) + 0x9E3779B97F4A7C15)
        # Two rounds, for seeds that are negative or longer than 64 bits.
        mixed = _mix(mixed ^ ((word >> 64) & _MASK))
    return mixed


def _mix(x: int) -> int:
    # The finalizer of splitmix64.
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _hashes(n: int, key: Key) -> np.ndarray:
    """Returns the first `n` numbers of the splitmix64 stream of a key."""
    step = np.uint64(0x9E3779B97F4A7C15)
    x = np.uint64(_hash_key(key)) + np.arange(1, n + 1, dtype=np.uint64) * step
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def _table(n: int, key: Key) -> np.ndarray:
    return np.argsort(_hashes(n, key), kind="stable")


@functools.lru_cache(maxsize=4)
def _rounds(n: int, key: Key) -> tuple[int, int, list[np.ndarray]]:
    left_size = math.isqrt(n - 1) + 1
    right_size = -(-n // left_size)
    # int32 is twice as fast; the sum of two values must not reach the sign bit.
    dtype = np.int32 if left_size * right_size < 2**31 else np.int64
    sizes = [(right_size, left_size), (left_size, right_size)] * (N_ROUNDS // 2)
    tables = [
        (_hashes(n_in, (*key, at)) % np.uint64(n_out)).astype(dtype)
        for at, (n_in, n_out) in enumerate(sizes)
    ]
    return left_size, right_size, tables


def _feistel(
    positions: np.ndarray, left_size: int, right_size: int, rounds: list[np.ndarray]
) -> np.ndarray:
    left, right = np.divmod(positions.astype(rounds[0].dtype), rounds[0].dtype.type(right_size))
    for at, table in enumerate(rounds):
        if at % 2 == 0:
            _add_modulo(left, table.take(right), left_size)
        else:
            _add_modulo(right, table.take(left), right_size)
    left *= right_size
    left += right
    return left.astype(np.int64)


def _add_modulo(x: np.ndarray, y: np.ndarray, size: int) -> None:
    """Adds in place, modulo `size`, without a division."""
    x += y
    x -= size
    x += (x >> (8 * x.itemsize - 1)) & size
