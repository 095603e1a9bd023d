"""Packs documents of different lengths into rows of equal length.

The plan is made once, from the lengths alone: best fit, longest documents first. It is the same
for every seed and epoch; only the order of the rows is shuffled. Documents in a row do not see
each other if the model masks attention by segments, so it does not matter which share a row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tekoa.data.batching import ragged
from tekoa.data.readers.base import DataError, Info, RandomAccess, Reader, RowRequest, describe

SEGMENTS, POSITIONS, MASK = "segments", "positions", "token_mask"


class Plan(NamedTuple):
    """Which pieces of which documents form the rows.

    Attributes:
        documents: Document of each piece; the pieces of a row follow one another.
        starts: Where each piece starts in its document.
        sizes: Length of each piece.
        ends: Number of pieces in the first 1, 2, ... rows.
    """

    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray


def plan(lengths: np.ndarray, capacity: int) -> Plan:
    """Plans rows of `capacity` tokens; longer documents are cut into pieces, empty ones left out.

    >>> plan(np.array([3, 2, 5, 1]), 4).ends.tolist()
    [2, 4, 5]
    """
    n_pieces = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths)), n_pieces)
    first_piece = np.cumsum(n_pieces) - n_pieces
    starts = (np.arange(len(documents)) - first_piece[documents]) * capacity
    sizes = np.minimum(lengths[documents] - starts, capacity)
    rows = _best_fit(sizes, capacity)
    # Rows follow the order of their first documents.
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    rows = np.argsort(np.argsort(first))[inverse]
    by_row = np.argsort(rows, kind="stable")
    ends = np.cumsum(np.bincount(rows))
    return Plan(documents[by_row], starts[by_row], sizes[by_row], ends)


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Puts each piece, longest first, into the row that it fills best; returns the rows."""
    rows = np.zeros(len(sizes), np.int64)
    # Rows by the space left in them; bit n of `is_open` says whether there is one with space n.
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    is_open, n_rows = 0, 0
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if fitting := is_open >> size:
            space = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                is_open ^= 1 << space
        else:
            row, space, n_rows = n_rows, capacity, n_rows + 1
        rows[piece] = row
        if left := space - size:
            open_rows[left].append(row)
            is_open |= 1 << left
    return rows


class PackedReader(RandomAccess):
    """Rows of packed documents; see `Source.pack`."""

    def __init__(self, base: Reader, length: int, fields: Sequence[str], lengths: Any = None):
        if base.is_stream:
            raise DataError(
                f"{base.name} can only be read forwards, so its documents cannot be packed. "
                "Convert it to a format with random access, such as jsonl or array_record."
            )
        self._base, self._length, self._fields = base, length, tuple(fields)
        self._lengths = ragged.lengths_of(base, fields[0], lengths)
        self._plan = plan(self._lengths, length)
        if not len(self._plan.ends):
            raise DataError(f"{base.name} contains no documents with tokens to pack.")
        self.name = f"{base.name}, packed into {len(self)} rows of {length}"

    def __len__(self) -> int:
        return len(self._plan.ends)

    @property
    def info(self) -> Info:
        """The facts of the documents, with their number and the share of padding."""
        base, shapes = self._base.info, describe(self.name, self.first())
        padding = 1 - int(self._plan.sizes.sum()) / (len(self) * self._length)
        facts = {**base.facts, "n_documents": len(self._lengths), "padding": padding}
        return dataclasses.replace(
            base, name=self.name, shapes=shapes.shapes, dtypes=shapes.dtypes, facts=facts
        )

    def gather(self, request: RowRequest) -> Any:
        n_rows, ends = len(request.rows), self._plan.ends
        segments, positions = np.zeros((2, n_rows, self._length), np.int32)
        packed: dict[str, np.ndarray] = {}
        for at, (row, epoch) in enumerate(zip(request.rows.tolist(), request.epochs.tolist())):
            first, end = int(ends[row - 1]) if row else 0, int(ends[row])
            pieces = slice(first, end)
            documents = self._plan.documents[pieces]
            rows = request._replace(rows=documents, epochs=np.full(len(documents), epoch))
            examples = ragged.read_examples(self._base, rows)
            starts, sizes = self._plan.starts[pieces].tolist(), self._plan.sizes[pieces].tolist()
            filled = 0
            for segment, (one, start, size) in enumerate(zip(examples, starts, sizes), start=1):
                n = int(self._lengths[documents[segment - 1]])
                values = ragged.fields_of(one, self._fields, n, self._base)
                place = slice(filled, filled + size)
                segments[at, place], positions[at, place] = segment, np.arange(size)
                for name, value in zip(self._fields, values, strict=True):
                    if name not in packed:
                        shape = (n_rows, self._length, *value.shape[1:])
                        packed[name] = np.zeros(shape, value.dtype)
                    packed[name][at, place] = value[start : start + size]
                filled += size
        return {**packed, SEGMENTS: segments, POSITIONS: positions, MASK: segments > 0}
