"""Cuts the sequences of a batch into shorter ones, for schedules of lengths."""

from typing import Any

import numpy as np

from tekoa.data.batching import stacking
from tekoa.data.batching.schedule import Schedule
from tekoa.data.readers.base import DataError


def cut(batch: Any, lengths: Schedule, i: int, name: str) -> Any:
    """Cuts the sequences of batch i into pieces, which become its rows, without copying them.

    A batch of 16 rows of 64 tokens becomes one of 64 rows of 16 tokens: the same tokens in the
    same order. Fields with one axis, a value per row, are repeated for each piece.

    Args:
        batch: Arrays, of which those with a second axis are sequences of one length.
        lengths: The length of the pieces of every batch.
        i: The number of the batch.
        name: The name of the data, for messages.

    Raises:
        DataError: If there are no sequences, they differ in length, or the pieces of this batch or
            of another one do not fill them.

    >>> lengths = Schedule.of('length', {0: 2, 10: 4})
    >>> cut({'tokens': np.arange(8).reshape(2, 4), 'n': np.array([1, 2])}, lengths, 0, 'a list')
    {'tokens': array([[0, 1], [2, 3], [4, 5], [6, 7]]), 'n': array([1, 1, 2, 2])}
    """
    wholes: set[int] = set()
    stacking.map_arrays(lambda array: wholes.update(array.shape[1:2]), batch)
    if len(wholes) != 1:
        raise DataError(
            f"length={lengths.as_json()} cuts sequences, but the second axes of the fields of "
            f"{name} have the lengths {sorted(wholes)}. Choose fields of one length with "
            "source.map."
        )
    (whole,) = wholes
    if uneven := [length for length in lengths.values if whole % length]:
        raise DataError(
            f"length={uneven[0]} must divide the length of the sequences of {name}, {whole}."
        )
    length = lengths.at(i)
    n_pieces = whole // length

    def in_pieces(array: np.ndarray) -> np.ndarray:
        if array.ndim == 1:
            return np.repeat(array, n_pieces)
        return array.reshape(len(array) * n_pieces, length, *array.shape[2:])

    return stacking.map_arrays(in_pieces, batch)
