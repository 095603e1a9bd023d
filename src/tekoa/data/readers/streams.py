"""Data that can only be read forwards: iterables, tf.data datasets, TFRecord files.

A stream becomes a `Reader` by buffering the examples between the lowest row that may still be
requested and the last one read. If the stream reports its own position, a saved data position
contains it and resuming costs nothing. Otherwise the stream is read again up to that row.
"""

import collections
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from tekoa.data.batching import stacking
from tekoa.data.readers.base import DataError, Info, RowRequest, decode_row, describe

_log = logging.getLogger("tekoa")

# Whoever requests more rows than this asks for the length.
_ALL_ROWS = 2**40
# Of examples that are held to count those of an iterator, which can be read only once.
_MAX_HELD_BYTES = 2**30
_SECONDS_BETWEEN_LINES = 10


class Cursor(Protocol):
    """An iterator over a stream that reports its position."""

    def __next__(self) -> Any: ...

    def state(self) -> Any:
        """Returns the position as JSON-able data, or None if the stream has no positions."""
        ...


class Stream(Protocol):
    """Data that can be read from its start, or from a saved position."""

    @property
    def name(self) -> str:
        """One-line description that changes when the data does."""
        ...

    @property
    def is_reusable(self) -> bool:
        """Whether it can be opened more than once."""
        ...

    def open(self, state: Any) -> Cursor:
        """Starts at a saved position, or at the start if `state` is None."""
        ...


class StreamReader:
    """Reads rows of a stream within a window that moves forwards through its epochs.

    Internally, an example is identified by its place: epoch times length plus row.

    Args:
        stream: The stream to read.
        decode: Converts an element to an example; only called for requested rows.
        **facts: Additional fields of `Info`.
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
        self._buffer: collections.deque[Any] = collections.deque()
        self._checkpoints = [(place, state)]

    def part(self, *, limit: int | None, start: int, step: int) -> "StreamReader":
        """Returns a reader of some of the elements; this reader must not be used afterwards."""
        part = PartOfStream(self._stream, limit=limit, start=start, step=step)
        return StreamReader(part, self._decode, **self._facts)

    @property
    def info(self) -> Info:
        return describe(self.name, self.first(), **self._facts)

    def first(self) -> Any:
        if self._first is None:
            if self._low == 0:
                self._read_to(1)
                if not self._buffer:
                    raise DataError(f"{self.name} contains no examples.")
            else:
                self._first = next(self._stream.open(None))
        return stacking.stack([self._decode_at(0, self._first)], self.name)

    def reach(self, n: int) -> int:
        if self._length is None and n < _ALL_ROWS:
            self._read_to(n)
        elif self._length is None:
            (self._count if self._stream.is_reusable else self._hold_all)()
        return n if self._length is None else min(n, self._length)

    def gather(self, request: RowRequest) -> Any:
        epochs, rows = request.epochs.tolist(), request.rows.tolist()
        places = [self._place(epoch, row) for epoch, row in zip(epochs, rows, strict=True)]
        if (lowest := min(places)) < self._low:
            self._restart(self._epoch_start(lowest), None)
        self._read_to(max(places) + 1)
        self._release(self._place(*request.floor))
        examples = [self._decode_at(place, self._buffer[place - self._low]) for place in places]
        return stacking.stack(examples, self.name)

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Returns the last checkpoint at or below the floor, and the length if known."""
        floor_place = self._place(*floor)
        usable = [checkpoint for checkpoint in self._checkpoints if checkpoint[0] <= floor_place]
        # There is none if another iterator over this stream has moved beyond the floor.
        place, state = usable[-1] if usable else (self._epoch_start(floor_place), None)
        return {"place": place, "state": state, "length": self._length}

    def resume(self, anchor: Any) -> None:
        self._length = anchor["length"]
        if anchor["state"] is None and anchor["place"] == self._low:
            return  # Nothing after it was dropped. An iterator could not be read again.
        # An anchor without a state is at the start of an epoch.
        self._restart(anchor["place"], anchor["state"])

    def _place(self, epoch: int, row: int) -> int:
        return epoch * (self._length or 0) + row

    def _epoch_start(self, place: int) -> int:
        return place - place % self._length if self._length else 0

    def _decode_at(self, place: int, element: Any) -> Any:
        return decode_row(self._decode, element, self.name, place % (self._length or place + 1))

    def _release(self, floor: int) -> None:
        while self._low < floor:
            self._buffer.popleft()
            self._low += 1
        while len(self._checkpoints) > 1 and self._checkpoints[1][0] <= floor:
            self._checkpoints.pop(0)

    def _read_to(self, end: int) -> None:
        """Reads up to the place `end`; in the first epoch, at most to the end of the stream."""
        if self._cursor is None:
            self._cursor = self._stream.open(self._start_state)
        elif self._head < end and (state := self._cursor.state()) is not None:
            self._checkpoints.append((self._head, state))
        while self._head < end:
            try:
                element = next(self._cursor)
            except StopIteration:
                if self._end_epoch():
                    return
                continue
            if self._first is None:
                self._first = element
            self._buffer.append(element)
            self._head += 1

    def _count(self) -> None:
        """Sets the length, by a pass over the stream that keeps no examples."""
        anchor = self.anchor((0, self._low))
        cursor, n_read = self._stream.open(None), 0
        next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        while True:
            try:
                next(cursor)
            except StopIteration:
                break
            n_read += 1
            if time.monotonic() > next_line:
                next_line += _SECONDS_BETWEEN_LINES
                _log.warning(
                    "Counting the examples of %s: %s so far. If it is endless, set a number of "
                    "steps and no epochs.",
                    self.name,
                    f"{n_read:,}",
                )
        self.resume({**anchor, "length": n_read})

    def _hold_all(self) -> None:
        """Sets the length, by reading a stream that can be read only once to its end.

        Raises:
            DataError: If its examples need too much memory.
        """
        while self._length is None:
            self._read_to(self._head + 1024)
            n_held = self._head - self._low
            if n_held * _n_bytes(self._first) > _MAX_HELD_BYTES:
                raise DataError(
                    f"{self.name} has more than {n_held:,} examples, or no end. It can be read "
                    "only once, so they would all be held in memory to count them. Set a number "
                    "of steps and no epochs, or pass a function that returns an iterator."
                )

    def _end_epoch(self) -> bool:
        """Sets the length after the first epoch and returns True; else starts the next epoch."""
        if self._length is None:
            self._length = self._head
            return True
        if self._head % self._length:
            raise DataError(
                f"{self.name} ended after {self._head % self._length} examples, but its first pass "
                f"had {self._length}. A stream must yield the same examples in each pass."
            )
        self._cursor = self._stream.open(None)
        self._checkpoints.append((self._head, None))
        return False


def _n_bytes(element: Any) -> int:
    sizes = []
    stacking.map_arrays(lambda leaf: sizes.append(np.asarray(leaf).nbytes), element)
    return sum(sizes)


class TfDataStream:
    """A `tf.data.Dataset`, read as numpy; its position is the number of elements read."""

    is_reusable = True

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.name = f"tf.data of {dataset.element_spec}"

    def open(self, state: Any) -> Cursor:
        n_read = state or 0
        dataset = self._dataset.skip(n_read) if n_read else self._dataset
        return IteratorCursor(dataset.as_numpy_iterator(), lambda n: n_read + n)


class IteratorCursor:
    """A cursor over an iterator; `get_state` returns the position after n elements."""

    def __init__(self, iterator: Iterator[Any], get_state: Callable[[int], Any]):
        self._iterator, self._get_state = iterator, get_state
        self._n_read = 0

    def __next__(self) -> Any:
        element = next(self._iterator)
        self._n_read += 1
        return element

    def state(self) -> Any:
        return self._get_state(self._n_read)


class PartOfStream:
    """Elements `start, start + step, ...` of a stream, up to `limit` of them."""

    def __init__(self, base: Stream, *, limit: int | None, start: int, step: int):
        self._base, self._range = base, (limit, start, step)
        self.is_reusable = base.is_reusable
        self.name = f"{base.name}, rows {start}::{step} up to {limit}"

    def open(self, state: Any) -> Cursor:
        n_read, n_yielded, base_state = state or (0, 0, None)
        return _PartCursor(self._base.open(base_state), self._range, n_read, n_yielded)


class _PartCursor:
    def __init__(self, base: Cursor, limit_start_step: tuple[int | None, int, int], *counts: int):
        self._base = base
        self._limit, self._start, self._step = limit_start_step
        self._n_read, self._n_yielded = counts

    def __next__(self) -> Any:
        while self._limit is None or self._n_yielded < self._limit:
            element, offset = next(self._base), self._n_read - self._start
            self._n_read += 1
            if offset >= 0 and offset % self._step == 0:
                self._n_yielded += 1
                return element
        raise StopIteration

    def state(self) -> Any:
        base_state = self._base.state()
        return None if base_state is None else (self._n_read, self._n_yielded, base_state)
