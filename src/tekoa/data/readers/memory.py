"""Readers of data in memory: dicts of arrays, and sequences of examples."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tekoa.data.batching import stacking
from tekoa.data.readers.base import DataError, Info, RandomAccess, RowRequest, decode_row, describe

# One gather of about this size serves several small batches: it fits into the cache and
# pays numpy's call overhead once.
_BLOCK_BYTES = 2**19
_MAX_BLOCK_ROWS = 4096


class ArrayReader(RandomAccess):
    """Reads examples along the first axis of each array, with one gather per field.

    >>> reader = ArrayReader({'x': np.arange(5) * 10}, 'tens')
    >>> reader.gather(RowRequest.of_rows([4, 0]))
    {'x': array([40,  0])}
    """

    def __init__(self, arrays: Mapping[str, Any], name: str, **facts: Any):
        self._arrays = {key: np.asarray(array) for key, array in arrays.items()}
        self._length = _common_length(self._arrays, name)
        row_bytes = sum(array.nbytes for array in self._arrays.values()) // self._length
        self.block_rows = min(_MAX_BLOCK_ROWS, max(1, _BLOCK_BYTES // max(1, row_bytes)))
        fields = [f"{key} {a.dtype}{list(a.shape[1:])}" for key, a in self._arrays.items()]
        self.name = f"{name}: {self._length} rows of {', '.join(fields)}"
        facts.setdefault("n_classes", _n_classes(self._arrays.get("label")))
        image = self._arrays.get("image")
        if image is not None and image.dtype == np.uint8:
            facts.setdefault("value_range", (0, 255))
        self.info = describe(name, self._arrays, **facts)

    def __len__(self) -> int:
        return self._length

    def gather(self, request: RowRequest) -> Any:
        # 'clip' skips numpy's bounds check; the batch order never requests other rows.
        rows = request.rows
        return {k: array.take(rows, axis=0, mode="clip") for k, array in self._arrays.items()}


def _common_length(arrays: Mapping[str, np.ndarray], name: str) -> int:
    if not arrays:
        raise DataError(f"{name} contains no arrays. Pass at least one field, such as {{'x': x}}.")
    scalars = [key for key, array in arrays.items() if array.ndim == 0]
    if scalars:
        raise DataError(
            f"{name}: {scalars} are scalars without an axis of examples. Remove them from the data."
        )
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name}: the arrays have different numbers of examples: {lengths}.")
    n = next(iter(lengths.values()))
    if n == 0:
        raise DataError(f"{name} contains no examples: every array has length 0.")
    return n


def _n_classes(label: np.ndarray | None) -> int | None:
    if label is None or label.ndim != 1 or not np.issubdtype(label.dtype, np.integer):
        return None
    return int(label.max()) + 1 if label.min() >= 0 else None


class SequenceReader(RandomAccess):
    """Reads the elements of anything with a length and an index, such as grain's MapDataset.

    Args:
        sequence: Has `__len__` and `__getitem__`; `__getitems__` is used if it exists.
        name: One-line description.
        decode: Converts an element to an example.
        **facts: Additional fields of `Info`.

    >>> reader = SequenceReader([{'x': 1}, {'x': 2}], 'a list')
    >>> reader.gather(RowRequest.of_rows([1]))
    {'x': array([2])}
    """

    def __init__(
        self, sequence: Any, name: str, decode: Callable[[Any], Any] | None = None, **facts: Any
    ):
        self._sequence, self._decode, self._facts = sequence, decode, facts
        if len(sequence) == 0:
            raise DataError(f"{name} contains no examples: its length is 0.")
        self.name = f"{name}: {len(sequence)} examples"

    def __len__(self) -> int:
        return len(self._sequence)

    @property
    def info(self) -> Info:
        return describe(self.name, self.first(), **self._facts)

    def gather(self, request: RowRequest) -> Any:
        rows = request.rows.tolist()
        if hasattr(self._sequence, "__getitems__"):
            elements = self._sequence.__getitems__(rows)
        else:
            elements = [self._sequence[row] for row in rows]
        if any(element is None for element in elements):
            raise DataError(
                f"{self.name} returns None for some of the rows {rows[:8]}, as a filtered grain "
                "MapDataset does. Pass its to_iter_dataset() instead."
            )
        pairs = zip(elements, rows, strict=True)
        examples = [decode_row(self._decode, element, self.name, row) for element, row in pairs]
        return stacking.stack(examples, self.name)
