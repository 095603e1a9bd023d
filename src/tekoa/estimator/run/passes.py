"""Data for the loops: repeated passes, and groups of consecutive batches."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tekoa import data
from tekoa.core import batch as batches


class Reiterable:
    """An iterable that opens its data again for each pass.

    Args:
        open_data: Returns the data of one pass.
    """

    def __init__(self, open_data: Callable[[], Any]):
        self._open_data = open_data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._open_data())


class MarkFirst:
    """Adds a field `is_first` to batches: whether they start a group of consecutive batches.

    Args:
        stream: Batches of a source.
        n_consecutive: Number of batches in a group; 0 if batches are independent, and then
            nothing is added.
        allow_changes: As in `Batches.restore`.
    """

    def __init__(self, stream: data.Batches, n_consecutive: float, *, allow_changes: bool = False):
        self._stream, self._n_consecutive = stream, n_consecutive
        self._allow_changes = allow_changes
        self._next = 0

    @property
    def n_batches(self) -> int | None:
        """Total number of batches, or None if endless."""
        return self._stream.n_batches

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of the batches; see `Batches.batch_sizes`."""
        return self._stream.batch_sizes

    @property
    def has_one_shape(self) -> bool:
        """Whether all batches have the same shapes; see `Batches.has_one_shape`."""
        return self._stream.has_one_shape

    def __iter__(self) -> "MarkFirst":
        return self

    def __next__(self) -> Any:
        batch = next(self._stream)
        is_first = self._n_consecutive and self._next % self._n_consecutive == 0
        self._next += 1
        if not self._n_consecutive or not isinstance(batch, dict):
            return batch
        return {**batch, "is_first": np.full(batches.n_rows(batch), is_first)}

    def seek(self, i: int) -> None:
        """Moves to batch `i`; see `Batches.seek`."""
        self._stream.seek(i)
        self._next = i

    def close(self) -> None:
        """Stops the worker processes, if any."""
        self._stream.close()

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch returned."""
        return {"next": self._next, "batches": self._stream.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a saved position."""
        self._stream.restore(state["batches"], allow_changes=self._allow_changes)
        # A change of the batch size changes the number of the next batch.
        self._next = self._stream.state()["batch"]
