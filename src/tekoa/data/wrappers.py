"""Readers made of other readers: a part of the rows, several in a row, mapped examples."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tekoa.data import permutation, stacking, streams
from tekoa.data.reader import DataError, Draw, Info, RandomAccess, Reader, describe, length


def part(reader: Reader, *, limit: int | None = None, start: int = 0, step: int = 1) -> Reader:
    """Makes a reader of rows `start, start + step, ...`, up to `limit` of them."""
    if isinstance(reader, Mapped):
        return reader.with_base(part(reader.base, limit=limit, start=start, step=step))
    if isinstance(reader, streams.StreamReader):
        return reader.part(limit=limit, start=start, step=step)
    return Strided(reader, limit=limit, start=start, step=step)


class Strided:
    """Rows of a reader that has random access; see `part`."""

    def __init__(self, base: Reader, *, limit: int | None, start: int, step: int):
        self._base, self._limit, self._start, self._step = base, limit, start, step
        self.is_lazy, self.is_stream = base.is_lazy, base.is_stream
        self.block_rows = base.block_rows
        self.name = f"{base.name}, rows {start}::{step} up to {limit}"

    @property
    def info(self) -> Info:
        """The base's facts."""
        return self._base.info

    def reach(self, n: int) -> int:
        """Gives `min(n, length)`."""
        n = n if self._limit is None else min(n, self._limit)
        if n <= 0:
            return 0
        end = self._start + (n - 1) * self._step + 1
        return max(0, -((self._start - self._base.reach(end)) // self._step))

    def gather(self, draw: Draw) -> Any:
        """Gives the base's rows that these rows stand for."""
        rows = draw.rows * self._step + self._start
        floor = self._base_floor(draw.floor)
        return self._base.gather(draw._replace(rows=rows, floor=floor))

    def first(self) -> Any:
        """Gives the first example as a batch of one."""
        if self._start == 0:
            return self._base.first()
        return self.gather(Draw.of_rows([0]))

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Gives the base's note."""
        return self._base.anchor(self._base_floor(floor))

    def resume(self, anchor: Any) -> None:
        """Hands the note to the base."""
        self._base.resume(anchor)

    def _base_floor(self, floor: tuple[int, int]) -> tuple[int, int]:
        return floor[0], floor[1] * self._step + self._start


class Mapped:
    """A reader's rows through a function.

    Args:
        base: Where the rows come from.
        transform: `transform(draw, batch)` gives the new batch, each row by itself.
        block_rows: How many rows are best transformed in one call.
    """

    def __init__(self, base: Reader, transform: Callable[[Draw, Any], Any], block_rows: int):
        self.base, self._transform = base, transform
        self.is_lazy, self.is_stream = base.is_lazy, base.is_stream
        self.reach, self.anchor, self.resume = base.reach, base.anchor, base.resume
        self.block_rows = block_rows
        self.name = base.name

    def with_base(self, base: Reader) -> "Mapped":
        """Maps another reader in the same way."""
        return Mapped(base, self._transform, self.block_rows)

    @property
    def info(self) -> Info:
        """The base's facts, with the shapes and dtypes of the mapped first example."""
        base = self.base.info
        seen = describe(base.name, self.first())
        is_same = seen.dtypes.get("image") == base.dtypes.get("image")
        return dataclasses.replace(
            base,
            shapes=seen.shapes,
            dtypes=seen.dtypes,
            value_range=base.value_range if is_same else None,
        )

    def gather(self, draw: Draw) -> Any:
        """Gives the transformed rows."""
        return self._transform(draw, self.base.gather(draw))

    def first(self) -> Any:
        """Gives the transformed first example as a batch of one."""
        return self._transform(Draw.of_rows([0]), self.base.first())


@dataclasses.dataclass(frozen=True)
class OnBatch:
    """Applies `fn(batch)` to the rows at once."""

    fn: Callable[[Any], Any]

    def __call__(self, draw: Draw, batch: Any) -> Any:
        """Gives the function's result."""
        return self.fn(batch)


@dataclasses.dataclass(frozen=True)
class OnExample:
    """Applies `fn(example)` to each row."""

    fn: Callable[[Any], Any]

    def __call__(self, draw: Draw, batch: Any) -> Any:
        """Gives the results, stacked."""
        examples = [self.fn(stacking.row(batch, at)) for at in range(len(draw.rows))]
        return stacking.stack(examples, "the mapped data")


@dataclasses.dataclass(frozen=True)
class OnExampleWithRng:
    """Applies `fn(example, rng)` to each row; rng is keyed by seed, epoch and row."""

    fn: Callable[[Any, np.random.Generator], Any]

    def __call__(self, draw: Draw, batch: Any) -> Any:
        """Gives the results, stacked."""
        keys = [(draw.seed, int(e), int(r)) for e, r in zip(draw.epochs, draw.rows, strict=True)]
        examples = [
            self.fn(stacking.row(batch, at), permutation.generator(key))
            for at, key in enumerate(keys)
        ]
        return stacking.stack(examples, "the mapped data")


class Concatenated(RandomAccess):
    """Several readers, one after the other; the examples must stack."""

    def __init__(self, parts: Sequence[Reader]):
        self._parts = list(parts)
        if any(part.is_stream for part in parts):
            raise DataError(
                f"Streams cannot be joined with other data: {[part.name for part in parts]}. "
                "Load them apart, or convert the stream's files to array_record."
            )
        self._ends = np.cumsum([length(part) for part in self._parts])
        self._check_fields()
        self.block_rows = min(part.block_rows for part in parts)
        self.name = " + ".join(part.name for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def info(self) -> Info:
        """The first part's facts; the classes of all parts."""
        infos = [part.info for part in self._parts]
        counts = [info.n_classes for info in infos]
        ranges = {info.value_range for info in infos}
        return dataclasses.replace(
            infos[0],
            name=self.name,
            n_classes=None if None in counts else max(n for n in counts if n is not None),
            value_range=ranges.pop() if len(ranges) == 1 else None,
        )

    def gather(self, draw: Draw) -> Any:
        """Gathers from each part its rows and puts them in the order asked."""
        owner = np.searchsorted(self._ends, draw.rows, side="right")
        batches, places = [], []
        for at in np.unique(owner):
            here = np.flatnonzero(owner == at)
            start = self._ends[at - 1] if at else 0
            part = Draw(rows=draw.rows[here] - start, epochs=draw.epochs[here], seed=draw.seed)
            batches.append(self._parts[at].gather(part))
            places.append(here)
        back = np.argsort(np.concatenate(places))
        return _joined(batches, back)

    def _check_fields(self) -> None:
        first = self._parts[0].info
        for part in self._parts[1:]:
            info = part.info
            if info.dtypes != first.dtypes or info.shapes != first.shapes:
                raise DataError(
                    "Data with different fields cannot be joined: "
                    f"{first.name} has {_shown(first)}, {info.name} has {_shown(info)}."
                )


def _joined(batches: list[Any], back: np.ndarray) -> Any:
    if isinstance(batches[0], dict):
        return {key: _joined([batch[key] for batch in batches], back) for key in batches[0]}
    if isinstance(batches[0], (tuple, list)):
        return type(batches[0])([_joined(list(column), back) for column in zip(*batches)])
    return np.concatenate(batches)[back]


def _shown(info: Info) -> str:
    return ", ".join(f"{key} {info.dtypes[key]}{info.shapes[key]}" for key in info.dtypes)
