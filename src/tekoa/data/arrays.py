"""Arrays in memory as a reader: a batch is one vectorised gather per field."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tekoa.data.reader import Batch, DataError, Draw, Info, RandomAccess, describe

# One gather of about this size serves several small batches: it stays in the cache and
# pays for numpy's call overhead once.
_BLOCK_BYTES = 2**19
_MAX_BLOCK_ROWS = 4096


class ArrayReader(RandomAccess):
    """Examples along the first axis of each array.

    >>> reader = ArrayReader({'x': np.arange(5) * 10}, 'tens')
    >>> reader.gather(Draw.of_rows([4, 0]))
    {'x': array([40,  0])}
    """

    def __init__(self, arrays: Mapping[str, Any], name: str, **facts: Any):
        self._arrays = {key: np.asarray(array) for key, array in arrays.items()}
        self._length = _common_length(self._arrays, name)
        row_bytes = sum(array.nbytes for array in self._arrays.values()) // self._length
        self.block_rows = min(_MAX_BLOCK_ROWS, max(1, _BLOCK_BYTES // max(1, row_bytes)))
        fields = ", ".join(
            f"{key} {array.dtype}{list(array.shape[1:])}" for key, array in self._arrays.items()
        )
        self.name = f"{name}: {self._length} rows of {fields}"
        self.info = self._make_info(name, facts)

    def __len__(self) -> int:
        return self._length

    def gather(self, draw: Draw) -> Batch:
        """Copies the rows asked for."""
        # 'clip' spares numpy a pass; orders never ask outside the rows.
        return {
            key: array.take(draw.rows, axis=0, mode="clip") for key, array in self._arrays.items()
        }

    def _make_info(self, name: str, facts: dict[str, Any]) -> Info:
        facts.setdefault("n_classes", _n_classes(self._arrays.get("label")))
        image = self._arrays.get("image")
        if image is not None and image.dtype == np.uint8:
            facts.setdefault("value_range", (0, 255))
        return describe(name, self._arrays, **facts)


def _common_length(arrays: Mapping[str, np.ndarray], name: str) -> int:
    if not arrays:
        raise DataError(f"{name} holds no array.")
    scalars = [key for key, array in arrays.items() if array.ndim == 0]
    if scalars:
        raise DataError(f"{name}: {scalars} have no axis of examples. Leave them out of the data.")
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name}: the arrays have different numbers of examples: {lengths}.")
    n = next(iter(lengths.values()))
    if n == 0:
        raise DataError(f"{name} holds no example: every array has length 0.")
    return n


def _n_classes(label: np.ndarray | None) -> int | None:
    if label is None or label.ndim != 1 or not np.issubdtype(label.dtype, np.integer):
        return None
    return int(label.max()) + 1 if label.min() >= 0 else None
