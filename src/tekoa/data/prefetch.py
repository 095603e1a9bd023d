"""Transfers batches to the devices ahead of their use."""

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekoa.data import interop
from tekoa.data.readers.base import DataError


def device_prefetch(batches: Any, sharding: Any = None, size: int = 2) -> "DevicePrefetch":
    """Iterates over batches on the devices, with `size` transfers under way.

    Transfers overlap with computation: a batch is returned as soon as its transfer has
    started. With several processes each provides its own rows of the global batch.

    Args:
        batches: Iterator of batches of numpy arrays.
        sharding: A `jax.sharding.Sharding` for all arrays of a batch, or a tree of them; None
            is the default device.
        size: Number of batches to prefetch, at least 1.

    Returns:
        An iterator with `state()` and `restore()`; the position counts the batches returned,
        not those prefetched.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    return DevicePrefetch(interop.as_batches(batches), sharding, size)


class DevicePrefetch(Iterator[Any]):
    """The iterator returned by `device_prefetch`."""

    def __init__(self, batches: Any, sharding: Any, size: int):
        self._batches, self._sharding, self._size = batches, sharding, size
        self._ahead: collections.deque[tuple[Any, dict[str, Any]]] = collections.deque()
        self._state = batches.state()

    def __next__(self) -> Any:
        while len(self._ahead) < self._size:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            self._ahead.append((_put(batch, self._sharding), self._batches.state()))
        if not self._ahead:
            raise StopIteration
        batch, self._state = self._ahead.popleft()
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the data position after the last batch returned."""
        return self._state

    def restore(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Continues from a saved data position; see `Batches.restore`."""
        self._batches.restore(state, allow_changes=allow_changes)
        self._ahead.clear()
        self._state = self._batches.state()

    def close(self) -> None:
        """Closes the iterator of batches, such as its worker processes."""
        self._ahead.clear()
        if hasattr(self._batches, "close"):
            self._batches.close()


def _put(batch: Any, sharding: Any) -> Any:
    import jax

    from tekoa.sharding import placement

    for leaf in jax.tree.leaves(batch):
        if np.asarray(leaf).dtype == object:
            raise DataError(
                f"Text and bytes cannot be put on a device: {np.ravel(leaf)[:1]!r} in the batch. "
                "Convert them to numbers with source.map, or remove them."
            )
    return placement.put_batch(batch, sharding)
