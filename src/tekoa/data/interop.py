"""Adapts data of other libraries: arrays, iterables, datasets of grain, tf.data, torch and others.

Also the one place that reads and sets the position of any iterator (`position`, `go_to`).
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import patterns
from tekoa.data.batching import stacking
from tekoa.data.readers import huggingface, streams
from tekoa.data.readers.base import (
    ChangedDataError,
    DataError,
    other_position,
    tensor_as_array,
)
from tekoa.data.readers.memory import ArrayReader, SequenceReader
from tekoa.data.source import Source


def as_source(data: Any) -> Source:
    """Converts data in any form to a source.

    Args:
        data: A source; a pattern; a dict of arrays; a `datasets.Dataset`; anything with a length
            and an index (a list, grain's MapDataset, a torch Dataset); a `tf.data.Dataset`,
            grain's IterDataset or another iterable of examples; or a function that returns one.

    Raises:
        TypeError: If it is none of these.

    >>> len(as_source([{'x': 1}, {'x': 2}]))
    2
    """
    kind = type(data).__name__
    if isinstance(data, Source):
        return data
    if isinstance(data, (str, Path)) or _is_list_of_patterns(data):
        return patterns.load(data)
    if huggingface.is_dataset(data) and hasattr(data, "__len__"):
        return Source(huggingface.DatasetReader(data))
    if isinstance(data, Mapping):
        return Source(ArrayReader(data, "arrays"))
    if hasattr(data, "as_numpy_iterator"):
        return Source(streams.StreamReader(streams.TfDataStream(data)))
    if getattr(data, "batch_sampler", None) is not None:  # A loader of torch.
        raise DataError(
            f"A {kind} yields batches, but examples are needed here. Pass the dataset of the "
            "loader, or the loader to `fit`, a loop or data.as_batches."
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not _is_iterable_only(data):
        return Source(SequenceReader(data, kind))
    if hasattr(data, "__iter__") or callable(data):
        return Source(streams.StreamReader(IterableStream(data)))
    raise TypeError(
        f"Cannot read examples from an object of type {kind}: {data!r}. Pass a pattern, a dict of "
        "arrays, a sequence or an iterable of examples."
    )


def _is_iterable_only(data: Any) -> bool:
    """Whether it is an `IterableDataset` of torch, whose `__getitem__` only raises an error."""
    return any(base.__name__ == "IterableDataset" for base in type(data).__mro__)


def _is_list_of_patterns(data: Any) -> bool:
    is_list = isinstance(data, Sequence) and len(data) > 0
    return is_list and all(isinstance(item, (str, Path)) for item in data)


def as_batches(batches: Any) -> Any:
    """Converts an iterable of ready batches to an iterator with `state()` and `restore()`.

    An iterator that has both is returned unchanged. A sequence, a `tf.data.Dataset` and an
    iterator with its own position (see `position`) are resumed directly; any other iterable
    is read again up to its position.

    >>> batches = as_batches([{'x': 1}, {'x': 2}])
    >>> next(batches), batches.state()['batch']
    ({'x': 1}, 1)
    """
    if hasattr(batches, "state") and hasattr(batches, "restore"):
        return batches
    is_tf_data = hasattr(batches, "as_numpy_iterator")
    return ForeignBatches((streams.TfDataStream if is_tf_data else IterableStream)(batches))


class ForeignBatches(Iterator[Any]):
    """An iterator over ready batches of another library that counts them."""

    def __init__(self, stream: streams.Stream):
        self._stream = stream
        self._cursor: streams.Cursor | None = None
        self._next = 0

    def __next__(self) -> Any:
        self._cursor = self._cursor or self._stream.open(None)
        batch = next(self._cursor)
        self._next += 1
        return batch

    def state(self) -> dict[str, Any]:
        place = self._cursor.state() if self._cursor else None
        return {"batch": self._next, "stream": self._stream.name, "place": place}

    def restore(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        is_same = state.get("stream") == self._stream.name
        if not is_same and not allow_changes:
            raise ChangedDataError(
                f"The data position was saved for {state.get('stream')!r}, but the data is now "
                f"{self._stream.name!r}. Restore with allow_changes=True to continue anyway."
            )
        # The position in another stream has no meaning for this one, so batches are counted.
        batch, place = state["batch"], state["place"] if is_same else None
        if place is not None or batch < self._next or self._cursor is None:
            self._cursor = self._stream.open(place)
            self._next = batch if place is not None else 0
        while self._next < batch:
            next(self)


class IterableStream:
    """Any iterable, or a function that returns one."""

    def __init__(self, iterable: Any):
        self._iterable = iterable
        self.name = f"iterable {type(iterable).__name__}"
        self.is_reusable = not isinstance(iterable, Iterator)
        self._is_used_up = False
        self._start: Any = None

    def open(self, state: Any) -> streams.Cursor:
        if self._is_used_up:
            raise DataError(
                f"{self.name} is an iterator and can be read only once, but it is needed again for "
                "another epoch or an earlier position. Pass an iterable or a function instead."
            )
        data: Any = self._iterable() if callable(self._iterable) else self._iterable
        iterator = iterate(data)
        if isinstance(iterator, _StatefulIterator):
            # Such data continues where it was left, so its start is a position too.
            self._start = self._start or iterator.state()
            state = self._start if state is None else state
        self._is_used_up = iterator is self._iterable
        if state is not None and not go_to(iterator, state):
            raise ChangedDataError(
                f"{self.name} cannot go to the saved position {state!r}: its iterator has neither "
                "restore() nor set_state(). Use the data with which the position was saved."
            )
        return streams.IteratorCursor(iterator, lambda _: position(iterator))


def iterate(data: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator over the data; for a sequence, one with a position.

    Raises:
        TypeError: If the data is not iterable.
    """
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return _SequenceIterator(data)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"Data must be an iterable of batches, got {type(data).__name__}: {data!r:.60}"
        )
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        return _StatefulIterator(data)
    return map(_as_numpy, data) if _yields_tensors(data) else iter(data)


def _yields_tensors(data: Any) -> bool:
    """Whether the data is a loader of torch."""
    return hasattr(data, "collate_fn")


def _as_numpy(batch: Any) -> Any:
    """Replaces tensors by arrays that share their memory; other leaves stay as they are."""
    return stacking.map_arrays(_tensor_as_numpy, batch)


def _tensor_as_numpy(leaf: Any) -> Any:
    if hasattr(leaf, "detach"):
        return tensor_as_array(leaf)
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf


class _SequenceIterator(Iterator[Any]):
    """An iterator over a sequence that can save and restore its position."""

    def __init__(self, items: Sequence[Any]):
        self._items, self._next = items, 0

    def __next__(self) -> Any:
        if self._next >= len(self._items):
            raise StopIteration
        self._next += 1
        return self._items[self._next - 1]

    def state(self) -> dict[str, int]:
        return {"next": self._next}

    def restore(self, state: dict[str, int]) -> None:
        if not isinstance(state, dict) or "next" not in state:
            raise other_position(state, "a list of batches")
        self._next = int(state["next"])


class _StatefulIterator(Iterator[Any]):
    """An iterator over data that holds the position itself: torchdata's loaders, `datasets`."""

    def __init__(self, data: Any):
        self._data, self._iterator = data, None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = map(_as_numpy, self._data)
        return next(self._iterator)

    def state(self) -> Any:
        """Returns the position; None if it is not complete, or holds tensors."""
        if _has_shuffle_buffer(self._data):
            return None
        state = self._data.state_dict()
        try:
            json.dumps(state)
        except TypeError:
            return None
        return state

    def restore(self, state: Any) -> None:
        self._data.load_state_dict(state)
        self._iterator = None


def _has_shuffle_buffer(data: Any) -> bool:
    """Whether a `datasets.IterableDataset` shuffles in a buffer, which its position lacks."""
    parts = [getattr(data, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if hasattr(part, "buffer_size"):
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


def position(iterator: Iterator[Any]) -> Any:
    """Returns an iterator's position as JSON-able data, or None if it has none.

    The methods are `state()` and `restore()`, or grain's `get_state()` and `set_state()`.

    >>> batches = iterate(['a', 'b'])
    >>> next(batches), position(batches), position(iter({'a', 'b'}))
    ('a', {'next': 1}, None)
    """
    methods = _position_methods(iterator)
    if methods is None:
        return None
    state = methods[0]()
    if isinstance(state, bytes):  # From grain's DataLoader.
        return {"base64": base64.b64encode(state).decode()}
    return stacking.map_arrays(lambda x: x.item() if isinstance(x, np.generic) else x, state)


def go_to(iterator: Iterator[Any], state: Any) -> bool:
    """Moves an iterator to a position returned by `position`; returns whether it can."""
    methods = _position_methods(iterator)
    if methods is None:
        return False
    is_bytes = isinstance(state, dict) and set(state) == {"base64"}
    methods[1](base64.b64decode(state["base64"]) if is_bytes else state)
    return True


def _position_methods(iterator: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    for names in (("state", "restore"), ("get_state", "set_state")):
        get, move = (getattr(iterator, name, None) for name in names)
        if callable(get) and callable(move):
            return get, move
    return None
