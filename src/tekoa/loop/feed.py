"""The loop's side of the data: batches one by one, checked, with a position to resume."""

import base64
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import batch as batches
from tekoa.core import objective

_log = logging.getLogger("tekoa")


class Feed:
    """Draws batches from any iterable and knows where it is, if the data can tell.

    A tekoa dataset, a grain iterator and a sequence have a position; for anything else
    `state` is None.

    Args:
        data: The batches.
        split: Tells the inputs of a batch from its targets; here it only checks.
    """

    def __init__(self, data: Iterable[Any], split: objective.Split = batches.split_batch):
        self._iterator = positioned(data)
        self._split = split
        self._form: Any = None
        self._last: Any = None
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
            self.check(self._peeked[0])
        return self._peeked[0]

    def next(self) -> Any:
        """Draws the next batch; raises StopIteration at the end.

        Raises:
            TypeError: If the batch has not the structure of the first one, or a leaf is not
                an array.
        """
        batch = self._peeked.pop() if self._peeked else next(self._iterator)
        self.check(batch)
        return batch

    def check(self, batch: Any) -> None:
        """Raises if the batch has another form than it must; tells of new shapes.

        Raises:
            TypeError: If the structure is wrong, or a leaf is not an array.
        """
        leaves, structure = jax.tree.flatten(batch)
        form = structure, [(getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in leaves]
        if form == self._form:
            return
        self._split(batch)
        batches.check_arrays(batch)
        if self._form is not None:
            was, now = batches.describe(self._last), batches.describe(batch)
            if structure != self._form[0]:
                raise TypeError(f"The data changed its structure: first {was}, now {now}.")
            _log.warning("The batch changed from %s to %s: the step compiles again.", was, now)
        self._form, self._last = form, batch

    @property
    def state(self) -> Any:
        """The position after the last batch drawn, as JSON-able data, or None."""
        if self._peeked:
            return self._before_peek
        return position(self._iterator)

    def restore(self, state: Any, *, then: int = 0) -> None:
        """Goes to a position that `state` gave; says so where that cannot be done.

        Args:
            state: The position.
            then: How many batches to draw from there and drop.
        """
        if state is not None and go_to(self._iterator, state):
            self._peeked.clear()
            for _ in range(then):
                next(self._iterator)
            return
        _log.warning(
            "The position in the data (%s) cannot be restored: training goes on with what it "
            "yields now. A list, a tekoa dataset and a grain iterator can be resumed.",
            type(self._iterator).__name__,
        )


def positioned(data: Iterable[Any]) -> Iterator[Any]:
    """Gives an iterator over the data; that of a sequence knows its position.

    Raises:
        TypeError: If the data cannot be iterated over.
    """
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return _Listed(data)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"Data must be an iterable of batches, got {type(data).__name__}: {data!r:.60}"
        )
    return iter(data)


def position(iterator: Iterator[Any]) -> Any:
    """Gives an iterator's position as JSON-able data, or None if it cannot tell."""
    method = _method(iterator, "state", "get_state")
    return None if method is None else _to_json(method())


def go_to(iterator: Iterator[Any], state: Any) -> bool:
    """Brings an iterator to a position; tells whether it can do that."""
    method = _method(iterator, "restore", "set_state")
    if method is not None:
        method(_from_json(state))
    return method is not None


def _method(iterator: Any, *names: str) -> Callable[..., Any] | None:
    """Tekoa's name for it, or grain's."""
    found = (getattr(iterator, name, None) for name in names)
    return next((method for method in found if callable(method)), None)


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
