"""Readers based on other readers: a part of the rows, a concatenation, mapped examples."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tekoa.core import messages
from tekoa.data.batching import permutation, stacking
from tekoa.data.readers import streams
from tekoa.data.readers.base import (
    DataError,
    Info,
    RandomAccess,
    Reader,
    RowRequest,
    describe,
    length,
)


def part(reader: Reader, *, limit: int | None = None, start: int = 0, step: int = 1) -> Reader:
    """Returns a reader of rows `start, start + step, ...`, up to `limit` of them."""
    if isinstance(reader, Mapped):
        return reader.with_base(part(reader.base, limit=limit, start=start, step=step))
    if isinstance(reader, streams.StreamReader):
        return reader.part(limit=limit, start=start, step=step)
    return Strided(reader, limit=limit, start=start, step=step)


class Strided:
    """Some of the rows of a reader with random access; see `part`."""

    def __init__(self, base: Reader, *, limit: int | None, start: int, step: int):
        self._base, self._limit, self._start, self._step = base, limit, start, step
        self.is_lazy, self.is_stream = base.is_lazy, base.is_stream
        self.block_rows, self.resume = base.block_rows, base.resume
        self.name = f"{base.name}, rows {start}::{step} up to {limit}"

    @property
    def info(self) -> Info:
        return self._base.info

    def reach(self, n: int) -> int:
        n = n if self._limit is None else min(n, self._limit)
        if n <= 0:
            return 0
        end = self._start + (n - 1) * self._step + 1
        return max(0, -((self._start - self._base.reach(end)) // self._step))

    def gather(self, request: RowRequest) -> Any:
        rows = request.rows * self._step + self._start
        floor = self._base_floor(request.floor)
        return self._base.gather(request._replace(rows=rows, floor=floor))

    def first(self) -> Any:
        return self.gather(RowRequest.of_rows([0])) if self._start else self._base.first()

    def anchor(self, floor: tuple[int, int]) -> Any:
        return self._base.anchor(self._base_floor(floor))

    def _base_floor(self, floor: tuple[int, int]) -> tuple[int, int]:
        return floor[0], floor[1] * self._step + self._start


class Selected(RandomAccess):
    """The rows with the given numbers, in their order, of a reader with random access."""

    def __init__(self, base: Reader, rows: np.ndarray, name: str):
        self._base, self._rows = base, rows
        self.block_rows, self.name = base.block_rows, f"{base.name}, {name}"

    @property
    def info(self) -> Info:
        return self._base.info

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, request: RowRequest) -> Any:
        return self._base.gather(request._replace(rows=self._rows[request.rows]))


class Mapped:
    """The rows of a reader, transformed by a function.

    Args:
        base: The reader.
        transform: `transform(request, batch)` returns the new batch; rows are independent.
        block_rows: Best number of rows to transform in one call.
        classes: The classes of the labels, if the transform changes them.
    """

    def __init__(
        self,
        base: Reader,
        transform: Callable[[RowRequest, Any], Any],
        block_rows: int,
        classes: Sequence[str] | None = None,
    ):
        self.base, self._transform, self._classes = base, transform, classes
        self.is_lazy, self.is_stream = base.is_lazy, base.is_stream
        self.reach, self.anchor, self.resume = base.reach, base.anchor, base.resume
        self.name, self.block_rows = base.name, block_rows
        self._is_ragged = False

    def with_base(self, base: Reader) -> "Mapped":
        """Applies the same transform to another reader."""
        return Mapped(base, self._transform, self.block_rows, self._classes)

    @property
    def info(self) -> Info:
        """The base's facts, with the shapes and dtypes of the first mapped example."""
        base = self.base.info
        if self._classes is not None:
            facts = {**base.facts, "classes": list(self._classes)}
            base = dataclasses.replace(base, n_classes=len(self._classes), facts=facts)
        mapped = describe(base.name, self.first())
        is_same = mapped.dtypes.get("image") == base.dtypes.get("image")
        return dataclasses.replace(
            base,
            shapes=mapped.shapes,
            dtypes=mapped.dtypes,
            value_range=base.value_range if is_same else None,
        )

    def gather(self, request: RowRequest) -> Any:
        if not self._is_ragged:
            try:
                return self._transform(request, self.base.gather(request))
            except stacking.RaggedError:
                if self.block_rows > 1 or len(request.rows) == 1:
                    raise
                self._is_ragged = True
        # Examples of different shapes, which the transform may make equal.
        parts = [self._transform(one, self.base.gather(one)) for one in request.one_by_one()]
        return stacking.stack([stacking.row(part, 0) for part in parts], "the mapped data")

    def first(self) -> Any:
        return self._transform(RowRequest.of_rows([0]), self.base.first())


# Transforms for `Mapped`; `functools.partial(transform, fn)` can be sent to worker processes.
def apply_to_batch(fn: Callable[[Any], Any], request: RowRequest, batch: Any) -> Any:
    """Applies `fn(batch)` to all rows at once."""
    return fn(batch)


def apply_to_examples(fn: Callable[[Any], Any], request: RowRequest, batch: Any) -> Any:
    """Applies `fn(example)` to each row."""
    examples = [fn(stacking.row(batch, at)) for at in range(len(request.rows))]
    return stacking.stack(examples, "the mapped data")


def apply_with_rng(fn: Callable[[Any, Any], Any], request: RowRequest, batch: Any) -> Any:
    """Applies `fn(example, rng)` to each row; `rng` is keyed by seed, epoch and row."""
    pairs = zip(request.epochs.tolist(), request.rows.tolist(), strict=True)
    rngs = permutation.generators((request.seed, epoch, row) for epoch, row in pairs)
    examples = [fn(stacking.row(batch, at), rng) for at, rng in enumerate(rngs)]
    return stacking.stack(examples, "the mapped data")


def with_classes(reader: Reader, classes: Sequence[str], *, unknown: int | None = None) -> Reader:
    """Returns a reader with labels that are numbered by another list of classes.

    Args:
        reader: Data whose `info.facts` names its classes; other data keeps its labels.
        classes: The names of the classes.
        unknown: The label of classes that are not in the list; by default they are an error.

    Raises:
        DataError: If the data has a class that is not in the list.
    """
    own = reader.info.facts.get("classes", [])
    if unknown is None and (others := sorted(set(own) - set(classes))):
        raise DataError(
            f"{reader.name} has the classes {messages.some_of(others)}, which are not among "
            f"{messages.some_of(classes)}."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    # The last entry is that of -1, which stands for no class in datasets of Hugging Face.
    table = np.array([*(numbers.get(name, unknown) for name in own), -1], np.int32)
    renumber = functools.partial(apply_to_batch, functools.partial(_renumber, table))
    return Mapped(reader, renumber, reader.block_rows, classes)


def _renumber(table: np.ndarray, batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "label": table[batch["label"]]} if len(table) > 1 else batch


def _with_same_classes(readers: Sequence[Reader]) -> list[Reader]:
    """Returns readers that number the classes of all of them in the same way."""
    lists = [list(reader.info.facts.get("classes", [])) for reader in readers]
    if all(classes == lists[0] for classes in lists):
        return list(readers)
    classes = sorted({name for names in lists for name in names})
    return [with_classes(r, classes) if own else r for r, own in zip(readers, lists)]


class Concatenated(RandomAccess):
    """The rows of several readers with the same fields, one reader after the other.

    If the readers name the classes of their labels, the labels are numbered by the names of all.

    Args:
        parts: The readers.
        interleave: If true, rows alternate: the first row of each part, then the second of each.
    """

    def __init__(self, parts: Sequence[Reader], *, interleave: bool = False):
        if any(part.is_stream for part in parts):
            raise DataError(
                f"Cannot concatenate streams with other data: {[part.name for part in parts]}. "
                "Load them separately, or convert the stream's files to array_record."
            )
        self._parts = _with_same_classes(parts)
        sizes = [length(part) for part in self._parts]
        self._ends = np.cumsum(sizes)
        self._order: np.ndarray | None = None
        if interleave:
            self._order = np.argsort(np.concatenate([np.arange(n) for n in sizes]), kind="stable")
        self._check_fields()
        self.block_rows = min(part.block_rows for part in parts)
        self.name = ("in turns " if interleave else "") + " + ".join(part.name for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def info(self) -> Info:
        """The first part's facts, with the classes of all parts."""
        infos = [part.info for part in self._parts]
        counts = [info.n_classes for info in infos]
        ranges = {info.value_range for info in infos}
        return dataclasses.replace(
            infos[0],
            name=self.name,
            n_classes=None if None in counts else max(n for n in counts if n is not None),
            value_range=ranges.pop() if len(ranges) == 1 else None,
        )

    def gather(self, request: RowRequest) -> Any:
        rows = request.rows if self._order is None else self._order[request.rows]
        part_of_row = np.searchsorted(self._ends, rows, side="right")
        batches, indices = [], []
        for at in np.unique(part_of_row):
            index = np.flatnonzero(part_of_row == at)
            start = self._ends[at - 1] if at else 0
            rows_of_part, epochs = rows[index] - start, request.epochs[index]
            batches.append(self._parts[at].gather(RowRequest(rows_of_part, epochs, request.seed)))
            indices.append(index)
        return _concatenate(batches, np.argsort(np.concatenate(indices)))

    def _check_fields(self) -> None:
        first = self._parts[0].info
        for part in self._parts[1:]:
            info = part.info
            if info.dtypes != first.dtypes or info.shapes != first.shapes:
                raise DataError(
                    "Cannot concatenate data with different fields: "
                    f"{first.name} has {_fields(first)}, {info.name} has {_fields(info)}. "
                    "Load them separately, or use source.map to give them the same fields."
                )


def _concatenate(batches: list[Any], order: np.ndarray) -> Any:
    if isinstance(batches[0], dict):
        return {key: _concatenate([batch[key] for batch in batches], order) for key in batches[0]}
    if isinstance(batches[0], (tuple, list)):
        return type(batches[0])([_concatenate(list(column), order) for column in zip(*batches)])
    return np.concatenate(batches)[order]


def _fields(info: Info) -> str:
    return ", ".join(f"{key} {info.dtypes[key]}{info.shapes[key]}" for key in info.dtypes)
