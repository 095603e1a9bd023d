"""Examples of different lengths, read one by one because they cannot be stacked."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tekoa.data.readers.base import DataError, Reader, RowRequest, length


def read_examples(reader: Reader, request: RowRequest) -> Iterator[Any]:
    """Returns an iterator over the requested examples, each as a batch of one."""
    return map(reader.gather, request.one_by_one())


def lengths_of(reader: Reader, field: str, known: Any = None) -> np.ndarray:
    """Returns the length of a field in every example, int64.

    Args:
        reader: The examples; all are read, unless the reader knows the lengths.
        field: Name of the field; its first axis counts.
        known: The lengths, if the caller knows them.

    Raises:
        DataError: If the examples have no such field, or `known` has another number of lengths.
    """
    if known is None:
        known = getattr(reader, "lengths", None)
    n = length(reader)
    if known is None:
        rows = RowRequest.of_rows(np.arange(n))
        known = [len(field_of(one, field, reader)) for one in read_examples(reader, rows)]
    if len(known) != n:
        raise DataError(f"{reader.name} has {n} examples, but {len(known)} lengths were passed.")
    return np.asarray(known, np.int64)


def field_of(one: Any, field: str, reader: Reader) -> np.ndarray:
    """Returns a field of a batch of one, without the axis of the batch.

    Raises:
        DataError: If there is no such field, or its values have no length.
    """
    value = one.get(field) if isinstance(one, dict) else None
    if value is None or value.ndim < 2:
        fields = sorted(one) if isinstance(one, dict) else type(one).__name__
        raise DataError(
            f"The examples of {reader.name} need a list or array {field!r}, but they have "
            f"{fields}. Convert them with source.map."
        )
    return value[0]


def fields_of(one: Any, names: Sequence[str], n: int, reader: Reader) -> list[np.ndarray]:
    """Returns several fields of a batch of one, all of length `n`.

    Raises:
        DataError: If one of them has another length.
    """
    values = [field_of(one, name, reader) for name in names]
    for name, value in zip(names, values, strict=True):
        if len(value) != n:
            raise DataError(
                f"Field {name!r} of an example of {reader.name} has {len(value)} elements, but "
                f"{n} are expected: all packed or padded fields must have the same length, and the "
                "same one in every epoch."
            )
    return values
