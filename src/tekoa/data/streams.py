"""Data that can only be read forwards: iterables, grain and tf.data datasets, TFRecord files.

A stream becomes a `Reader` by keeping the examples between the lowest row that may still be
asked for and the furthest one read. Where the stream can tell its own position, a saved
position holds it and going on costs nothing; else it is read again up to that row.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tekoa.data import stacking
from tekoa.data.reader import DataError, Draw, Info, describe


class Cursor(Protocol):
    """A place in a stream."""

    def __next__(self) -> Any: ...

    def state(self) -> Any:
        """Gives a JSON-able note of the place, or None if there is no such thing."""
        ...


class Stream(Protocol):
    """Something that can be read from its start, or from a noted place."""

    @property
    def name(self) -> str:
        """What is read, in one line that changes when the data does."""
        ...

    def open(self, state: Any) -> Cursor:
        """Starts at a noted place, or at the start if `state` is None."""
        ...


class StreamReader:
    """Gives rows of a stream in a window that moves forwards through its epochs.

    Inside, a place is a number that runs on through all epochs: epoch times length plus row.

    Args:
        stream: What to read.
        decode: Makes an example of what the stream gives; called only for rows asked for.
        **facts: What else `Info` is to say.
    """

    is_lazy = True
    is_stream = True
    block_rows = 1

    def __init__(self, stream: Stream, decode: Callable[[Any], Any] | None = None, **facts: Any):
        self._stream, self._decode, self._facts = stream, decode, facts
        self.name = stream.name
        self._length: int | None = None
        self._first: Any = None
        self._restart(0, None)

    def _restart(self, place: int, state: Any) -> None:
        self._cursor: Cursor | None = None
        self._start_state = state
        self._low = self._head = place
        self._kept: collections.deque[Any] = collections.deque()
        self._notes = [(place, state)]

    def part(self, *, limit: int | None, start: int, step: int) -> "StreamReader":
        """Makes a reader of some of the elements; this one is not to be used any more."""
        part = PartOfStream(self._stream, limit=limit, start=start, step=step)
        return StreamReader(part, self._decode, **self._facts)

    @property
    def info(self) -> Info:
        """Shapes and dtypes of the first example."""
        return describe(self.name, self.first(), **self._facts)

    def first(self) -> Any:
        """Gives the first example as a batch of one."""
        if self._first is None:
            if self._low == 0:
                self._read_to(1)
                if not self._kept:
                    raise DataError(f"{self.name} has no example.")
            else:
                self._first = next(self._stream.open(None))
        return stacking.stack([self._decoded(self._first)], self.name)

    def reach(self, n: int) -> int:
        """Gives `min(n, length)`, reading forwards until it is known."""
        if self._length is None:
            self._read_to(n)
        return n if self._length is None else min(n, self._length)

    def gather(self, draw: Draw) -> Any:
        """Gives rows that are not below the floor, reading forwards as needed."""
        places = [self._place(e, r) for e, r in zip(draw.epochs.tolist(), draw.rows.tolist())]
        if (lowest := min(places)) < self._low:
            self._restart(self._epoch_start(lowest), None)
        self._read_to(max(places) + 1)
        self._release(self._place(*draw.floor))
        picked = [self._decoded(self._kept[place - self._low]) for place in places]
        return stacking.stack(picked, self.name)

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Gives the latest noted place at or below the floor, and the length if known."""
        place = self._place(*floor)
        notes = [note for note in self._notes if note[0] <= place]
        # Another iterator of this stream may have left this place behind.
        noted, state = notes[-1] if notes else (self._epoch_start(place), None)
        return {"place": noted, "state": state, "length": self._length}

    def resume(self, anchor: Any) -> None:
        """Goes on from a noted place."""
        self._length = anchor["length"]
        # A note without a state stands at the start of an epoch.
        self._restart(anchor["place"], anchor["state"])

    def _place(self, epoch: int, row: int) -> int:
        return epoch * (self._length or 0) + row

    def _epoch_start(self, place: int) -> int:
        return place - place % self._length if self._length else 0

    def _decoded(self, raw: Any) -> Any:
        return raw if self._decode is None else self._decode(raw)

    def _release(self, floor: int) -> None:
        while self._low < floor:
            self._kept.popleft()
            self._low += 1
        while len(self._notes) > 1 and self._notes[1][0] <= floor:
            self._notes.pop(0)

    def _read_to(self, end: int) -> None:
        """Reads until `end` is read, or in the first epoch until the stream ends."""
        if self._cursor is None:
            self._cursor = self._stream.open(self._start_state)
        elif self._head < end and (state := self._cursor.state()) is not None:
            self._notes.append((self._head, state))
        while self._head < end:
            try:
                raw = next(self._cursor)
            except StopIteration:
                if self._end_epoch():
                    return
                continue
            if self._first is None:
                self._first = raw
            self._kept.append(raw)
            self._head += 1

    def _end_epoch(self) -> bool:
        """Notes the length, or goes on with the next epoch if it is known already."""
        if self._length is None:
            self._length = self._head
            return True
        if self._head % self._length:
            raise DataError(
                f"{self.name} ended after {self._head % self._length} examples; its first pass had "
                f"{self._length}. A stream must give the same examples each time."
            )
        self._cursor = self._stream.open(None)
        self._notes.append((self._head, None))
        return False


class IterableStream:
    """Any iterable, or a function that returns one; ends where it ends."""

    def __init__(self, iterable: Any, name: str | None = None):
        self._iterable = iterable
        self.name = name or f"iterable {type(iterable).__name__}"
        self._is_used_up = False

    def open(self, state: Any) -> Cursor:
        """Starts to iterate, from the start or by the iterator's own `set_state`."""
        if self._is_used_up:
            raise DataError(
                f"{self.name} is an iterator and can be read once only, but it is needed again for "
                "another epoch or an earlier position. Pass an iterable or a function instead."
            )
        data: Any = self._iterable() if callable(self._iterable) else self._iterable
        iterator = iter(data)
        self._is_used_up = iterator is self._iterable
        if state is not None:
            iterator.set_state(state)
        return IteratorCursor(iterator)


class IteratorCursor:
    """An iterator with grain's `get_state`, or without it."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._get_state = getattr(iterator, "get_state", lambda: None)

    def __next__(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        """Gives the iterator's own state, if it has one."""
        return self._get_state()


class TfDataStream:
    """A `tf.data.Dataset`, read as numpy; its place is the number of elements read."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.name = f"tf.data of {dataset.element_spec}"

    def open(self, state: Any) -> Cursor:
        """Starts to read, leaving out as many elements as noted."""
        n_read = state or 0
        dataset = self._dataset.skip(n_read) if n_read else self._dataset
        return _CountingCursor(dataset.as_numpy_iterator(), n_read)


class _CountingCursor:
    def __init__(self, iterator: Iterator[Any], n_read: int):
        self._iterator, self._n_read = iterator, n_read

    def __next__(self) -> Any:
        value = next(self._iterator)
        self._n_read += 1
        return value

    def state(self) -> int:
        return self._n_read


class PartOfStream:
    """Elements `start, start + step, ...` of a stream, up to `limit` of them."""

    def __init__(self, base: Stream, *, limit: int | None, start: int, step: int):
        self._base, self._limit, self._start, self._step = base, limit, start, step
        self.name = f"{base.name}, rows {start}::{step} up to {limit}"

    def open(self, state: Any) -> Cursor:
        """Starts to read at the first element of the part that is not read yet."""
        n_read, n_given, base_state = state or (0, 0, None)
        return _PartCursor(self._base.open(base_state), self._wants, n_read, n_given)

    def _wants(self, n_read: int, n_given: int) -> bool | None:
        """Tells whether the next element is in the part; None if nothing more is."""
        if self._limit is not None and n_given >= self._limit:
            return None
        return n_read >= self._start and (n_read - self._start) % self._step == 0


class _PartCursor:
    def __init__(self, base: Cursor, wants: Callable[[int, int], bool | None], *counts: int):
        self._base, self._wants = base, wants
        self._n_read, self._n_given = counts

    def __next__(self) -> Any:
        while (wanted := self._wants(self._n_read, self._n_given)) is not None:
            value = next(self._base)
            self._n_read += 1
            if wanted:
                self._n_given += 1
                return value
        raise StopIteration

    def state(self) -> Any:
        base_state = self._base.state()
        return None if base_state is None else (self._n_read, self._n_given, base_state)
