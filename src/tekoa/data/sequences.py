"""Anything with a length and examples by number: lists, grain's MapDataset, data sources."""

from collections.abc import Callable
from typing import Any

from tekoa.data import stacking
from tekoa.data.reader import DataError, Draw, Info, RandomAccess, describe


class SequenceReader(RandomAccess):
    """Examples `sequence[0]` to `sequence[len - 1]`.

    Args:
        sequence: Has `__len__` and `__getitem__`; `__getitems__` is used where it is there.
        name: What it is, in one line.
        decode: Makes an example of an element.
        **facts: What else `Info` is to say.

    >>> reader = SequenceReader([{'x': 1}, {'x': 2}], 'a list')
    >>> reader.gather(Draw.of_rows([1]))
    {'x': array([2])}
    """

    def __init__(
        self, sequence: Any, name: str, decode: Callable[[Any], Any] | None = None, **facts: Any
    ):
        self._sequence, self._decode, self._facts = sequence, decode, facts
        if len(sequence) == 0:
            raise DataError(f"{name} has no example.")
        self.name = f"{name}: {len(sequence)} examples"

    def __len__(self) -> int:
        return len(self._sequence)

    @property
    def info(self) -> Info:
        """Shapes and dtypes of the first example."""
        return describe(self.name, self.first(), **self._facts)

    def gather(self, draw: Draw) -> Any:
        """Reads the elements one by one, or together where the sequence can."""
        rows = draw.rows.tolist()
        if hasattr(self._sequence, "__getitems__"):
            elements = self._sequence.__getitems__(rows)
        else:
            elements = [self._sequence[row] for row in rows]
        if any(element is None for element in elements):
            raise DataError(
                f"{self.name} has no element in some of the rows {rows[:8]}, as a filtered grain "
                "MapDataset does. Pass its to_iter_dataset() instead."
            )
        if self._decode is not None:
            elements = [self._decode(element) for element in elements]
        return stacking.stack(elements, self.name)
