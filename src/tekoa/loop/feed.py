"""The loop's side of the data: batches one by one, checked, with a position to resume."""

import base64
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import batch as batches

_log = logging.getLogger("tekoa")


class Feed:
    """Draws batches from any iterable and knows where it is, if the data can tell.

    A tekoa dataset, a grain iterator and a sequence have a position; for anything else
    `state` is None.
    """

    def __init__(self, data: Iterable[Any]):
        if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
            data = _Listed(data)
        elif not isinstance(data, Iterable):
            raise TypeError(
                f"Data must be an iterable of batches, got {type(data).__name__}: {data!r:.60}"
            )
        self._iterator: Iterator[Any] = iter(data)
        self._form: Any = None
        self._warned = False
        self._peeked: list[Any] = []

    def peek(self) -> Any:
        """Gives the next batch without drawing it.

        Raises:
            ValueError: If there is none.
        """
        if not self._peeked:
            self._before_peek = self.state
            try:
                self._peeked.append(next(self._iterator))
            except StopIteration:
                raise ValueError("The data is empty: it yielded no batch at all.") from None
        return self._peeked[0]

    def next(self) -> Any:
        """Draws the next batch; raises StopIteration at the end.

        Raises:
            TypeError: If the batch has not the structure of the first one, or a leaf is not
                an array.
        """
        batch = self._peeked.pop() if self._peeked else next(self._iterator)
        leaves, structure = jax.tree.flatten(batch)
        form = structure, [getattr(x, "shape", ()) for x in leaves]
        if form != self._form:
            self._check(batch, structure)
            self._form = form
        return batch

    def _check(self, batch: Any, structure: Any) -> None:
        batches.split_batch(batch)
        batches.check_arrays(batch)
        if self._form is None:
            self._first = batch
            return
        if structure != self._form[0]:
            raise TypeError(
                f"The data changed its structure: first {batches.describe(self._first)}, "
                f"now {batches.describe(batch)}."
            )
        _log.warning(
            "The batch changed its shapes from %s to %s: the step compiles again.",
            batches.describe(self._first),
            batches.describe(batch),
        )
        self._first = batch

    @property
    def state(self) -> Any:
        """The position after the last batch drawn, as JSON-able data, or None."""
        if self._peeked:
            return self._before_peek
        for name in ("state", "get_state"):
            method = getattr(self._iterator, name, None)
            if callable(method):
                return _to_json(method())
        return None

    def restore(self, state: Any) -> None:
        """Goes to a position that `state` gave; says so once where that cannot be done."""
        for name in ("restore", "set_state"):
            method: Callable[[Any], Any] | None = getattr(self._iterator, name, None)
            if callable(method) and state is not None:
                self._peeked.clear()
                method(_from_json(state))
                return
        if not self._warned:
            self._warned = True
            _log.warning(
                "The data (%s) cannot tell its position: training goes on from its start.",
                type(self._iterator).__name__,
            )


class _Listed:
    """An iterator over a sequence that knows its position."""

    def __init__(self, items: Sequence[Any]):
        self._items, self._next = items, 0

    def __iter__(self) -> "_Listed":
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._items):
            raise StopIteration
        self._next += 1
        return self._items[self._next - 1]

    def state(self) -> dict[str, int]:
        return {"next": self._next}

    def restore(self, state: dict[str, int]) -> None:
        self._next = int(state["next"])


def _to_json(state: Any) -> Any:
    """Grain's loaders give bytes."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, state)


def _from_json(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"base64"}:
        return base64.b64decode(state["base64"])
    return state
