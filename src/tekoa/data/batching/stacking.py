"""Stacks examples into batches and splits batches, for any nesting of dicts and tuples.

An example is usually a dict of arrays. Nested dicts and tuples are supported for data
functions that were written for other libraries; a list is converted to an array.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tekoa.data.readers.base import DataError, as_array


class RaggedError(DataError):
    """A field has different shapes in different examples."""


def stack(examples: Sequence[Any], where: str, field: str = "") -> Any:
    """Stacks examples along a new first axis.

    Args:
        examples: At least one example; all must have the same structure.
        where: Where they were read from, for messages.
        field: Path of the field that they belong to, for messages.

    Raises:
        DataError: If fields are missing.
        RaggedError: If fields differ in shape.

    >>> stack([{'x': 1, 'name': 'a'}, {'x': 2, 'name': 'b'}], 'a list')
    {'x': array([1, 2]), 'name': array(['a', 'b'], dtype=object)}
    """
    first = examples[0]
    if isinstance(first, Mapping):
        for example in examples:
            if not isinstance(example, Mapping) or example.keys() != first.keys():
                raise DataError(
                    f"Examples of {where} have different fields: {_fields(first)} and "
                    f"{_fields(example)}. Use source.map to give them the same fields."
                )
        return {
            key: stack([example[key] for example in examples], where, f"{field}/{key}")
            for key in first
        }
    if isinstance(first, tuple):
        columns = zip(*examples, strict=True)
        return tuple(stack(column, where, f"{field}/{at}") for at, column in enumerate(columns))
    arrays = [as_array(value) for value in examples]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        a, b = sorted(shapes)[:2]
        raise RaggedError(
            f"Field {field.lstrip('/') or 'value'!r} of {where} has shape {a} in one example and "
            f"{b} in another, so they cannot be stacked. Pad or truncate it with source.map, or "
            "use source.pack or source.bucket."
        )
    return np.stack(arrays)


def _fields(example: Any) -> Any:
    return sorted(map(str, example)) if isinstance(example, Mapping) else type(example).__name__


def map_arrays(fn: Callable[[np.ndarray], Any], batch: Any) -> Any:
    """Applies `fn` to each array of a batch, keeping the structure.

    >>> map_arrays(len, {'x': np.zeros((2, 3)), 'y': (np.zeros(4),)})
    {'x': 2, 'y': (4,)}
    """
    if isinstance(batch, Mapping):
        return {key: map_arrays(fn, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [map_arrays(fn, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return fn(batch)


def row(batch: Any, at: int) -> Any:
    """Returns one example of a batch; its leaves are arrays, text or bytes.

    >>> row({'x': np.array([[1, 2], [3, 4]])}, 1)
    {'x': array([3, 4])}
    """
    return map_arrays(lambda array: array[at, ...] if array.dtype != object else array[at], batch)


def split(rows: Any, n_batches: int) -> list[Any]:
    """Splits stacked examples into batches of equal size, without copying.

    >>> split({'x': np.arange(6)}, 2)
    [{'x': array([0, 1, 2])}, {'x': array([3, 4, 5])}]
    """
    if type(rows) is dict and not any(isinstance(v, (dict, tuple, list)) for v in rows.values()):
        # A fast path for flat dicts: they are the common case.
        fields = [_in_batches(array, n_batches) for array in rows.values()]
        return [dict(zip(rows, batch)) for batch in zip(*fields)]
    blocks = map_arrays(lambda array: _in_batches(array, n_batches), rows)
    return [map_arrays(lambda array, at=at: array[at], blocks) for at in range(n_batches)]


def _in_batches(array: np.ndarray, n_batches: int) -> np.ndarray:
    # Rows may have no elements, so their number cannot be left to `reshape`.
    return array.reshape(n_batches, len(array) // n_batches, *array.shape[1:])
