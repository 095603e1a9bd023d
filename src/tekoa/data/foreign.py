"""Takes data of other libraries: arrays, lists, iterables, grain and tf.data datasets."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tekoa.data import patterns, streams
from tekoa.data.arrays import ArrayReader
from tekoa.data.reader import ChangedDataError
from tekoa.data.sequences import SequenceReader
from tekoa.data.source import Source


def as_source(data: Any) -> Source:
    """Makes a source of data in any form.

    Args:
        data: A source; a pattern; a dict of arrays; anything with a length and examples by
            number (a list, grain's MapDataset, a torch Dataset); a `tf.data.Dataset`, grain's
            IterDataset or another iterable of examples; or a function that returns one.

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
    if isinstance(data, Mapping):
        return Source(ArrayReader(data, "arrays"))
    if hasattr(data, "as_numpy_iterator"):
        return Source(streams.StreamReader(streams.TfDataStream(data)))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Source(SequenceReader(data, kind))
    if hasattr(data, "__iter__") or callable(data):
        return Source(streams.StreamReader(streams.IterableStream(data)))
    raise TypeError(
        f"Cannot read examples from a {kind}: {data!r}. Give a pattern, a dict of arrays, a "
        "sequence or an iterable of examples."
    )


def _is_list_of_patterns(data: Any) -> bool:
    is_list = isinstance(data, Sequence)
    return is_list and len(data) > 0 and all(isinstance(part, (str, Path)) for part in data)


def as_batches(batches: Any) -> Any:
    """Makes an iterator with `state()` and `restore()` of an iterable of ready batches.

    An iterator that has both is given back as it is. One with grain's `get_state` and
    `set_state` is resumed by them; any other is read again up to its place.

    >>> batches = as_batches([{'x': 1}, {'x': 2}])
    >>> next(batches), batches.state()['batch']
    ({'x': 1}, 1)
    """
    if hasattr(batches, "state") and hasattr(batches, "restore"):
        return batches
    if hasattr(batches, "as_numpy_iterator"):
        return ForeignBatches(streams.TfDataStream(batches))
    return ForeignBatches(streams.IterableStream(batches))


class ForeignBatches(Iterator[Any]):
    """Ready batches of another library, counted."""

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
        """Gives the number of the next batch, and the stream's own note of its place."""
        place = self._cursor.state() if self._cursor else None
        return {"batch": self._next, "stream": self._stream.name, "place": place}

    def restore(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Goes on from a saved position; see `Batches.restore`."""
        if state.get("stream") != self._stream.name and not allow_changes:
            raise ChangedDataError(
                f"The saved position is of {state.get('stream')!r}, not of {self._stream.name!r}. "
                "Restore with allow_changes=True to go on all the same."
            )
        at, place = state["batch"], state["place"]
        if place is not None or at < self._next or self._cursor is None:
            self._cursor = self._stream.open(place)
            self._next = at if place is not None else 0
        while self._next < at:
            next(self)
