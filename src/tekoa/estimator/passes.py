"""Data as the loops read it: again and again, or in runs of consecutive batches."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tekoa import data
from tekoa.core import batch as batches


class Again:
    """Data that is read from its start at every pass."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class WithFirst:
    """Batches that say whether they are the first of a run of consecutive ones.

    Args:
        stream: Batches of a source.
        n_consecutive: Length of a run; 0: every batch stands alone and nothing is said.
        allow_changes: As `Batches.restore` takes it.
    """

    def __init__(self, stream: data.Batches, n_consecutive: float, *, allow_changes: bool = False):
        self._stream, self._n_consecutive = stream, n_consecutive
        self._allow_changes = allow_changes
        self._next = 0

    @property
    def n_batches(self) -> int | None:
        """How many there are in all; None if without end."""
        return self._stream.n_batches

    def __iter__(self) -> "WithFirst":
        return self

    def __next__(self) -> Any:
        batch = next(self._stream)
        is_first = self._n_consecutive and self._next % self._n_consecutive == 0
        self._next += 1
        if not self._n_consecutive or not isinstance(batch, dict):
            return batch
        return {**batch, "is_first": np.full(batches.n_rows(batch), is_first)}

    def state(self) -> dict[str, Any]:
        """Gives the position after the last batch."""
        return {"next": self._next, "batches": self._stream.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self._stream.restore(state["batches"], allow_changes=self._allow_changes)
        # Of another size, they go on at another number.
        self._next = self._stream.state()["batch"]
