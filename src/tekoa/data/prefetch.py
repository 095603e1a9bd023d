"""Puts batches on the devices ahead of their use."""

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekoa.data import foreign
from tekoa.data.reader import DataError


def device_prefetch(batches: Any, sharding: Any = None, size: int = 2) -> "DevicePrefetch":
    """Iterates over batches on the devices, keeping `size` of them on their way.

    Transfers run beside the computation: a batch is handed out as soon as its transfer has
    begun. With several processes each gives its own rows of the global batch.

    Args:
        batches: Iterator of batches of numpy arrays.
        sharding: A `jax.sharding.Sharding` for every field, or a tree of them like a batch; None
            puts the batch on the default device.
        size: How many batches to keep ahead, at least 1.

    Returns:
        An iterator with `state()` and `restore()`; the position is that of the batches handed
        out, not of those on their way.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    return DevicePrefetch(foreign.as_batches(batches), sharding, size)


class DevicePrefetch(Iterator[Any]):
    """Made by `device_prefetch`."""

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
        """Gives the position after the last batch handed out."""
        return self._state

    def restore(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Goes on from a saved position; see `Batches.restore`."""
        self._batches.restore(state, allow_changes=allow_changes)
        self._ahead.clear()
        self._state = self._batches.state()

    def close(self) -> None:
        """Ends what the batches keep running."""
        self._ahead.clear()
        if hasattr(self._batches, "close"):
            self._batches.close()


def _put(batch: Any, sharding: Any) -> Any:
    import jax

    for leaf in jax.tree.leaves(batch):
        if np.asarray(leaf).dtype == object:
            raise DataError(
                f"Text and bytes cannot be put on a device: {np.ravel(leaf)[:1]!r} among the "
                "batch's fields. Turn them into numbers with source.map, or leave them out."
            )
    if sharding is None or jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch
        )
    return jax.tree.map(jax.make_array_from_process_local_data, sharding, batch)
