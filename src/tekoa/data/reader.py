"""What every kind of storage provides to be shuffled, batched and resumed: `Reader`.

A reader knows nothing of batches. It answers two questions: how far does the data reach,
and what are the examples in these rows. Orders and batches ask; files, arrays, streams
and wrappers around them answer.
"""

import abc
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

Batch = dict[str, np.ndarray]
Example = dict[str, Any]


class DataError(ValueError):
    """The data cannot be read as asked; the message names pattern, file and place."""


class ChangedDataError(DataError):
    """A saved position belongs to another source, seed, batch size or order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Facts about a source's examples, for building a model that fits them.

    Attributes:
        name: What is read, in one line.
        shapes: Shape of each field of one example.
        dtypes: Data type of each field.
        n_classes: How many values the label (or token) can take, where known.
        value_range: Lowest and highest value a pixel of `image` can take, where known.
        facts: Anything else that the kind of data knows, such as `end_id` of a vocabulary.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    dtypes: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)
    n_classes: int | None = None
    value_range: tuple[float, float] | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Draw(NamedTuple):
    """Examples asked of a reader in one call.

    Attributes:
        rows: Row of each example within its epoch, int64.
        epochs: Epoch of each example.
        seed: Seed of the run, for readers that differ by epoch.
        floor: Epoch and row below which this and later calls ask for nothing.
    """

    rows: np.ndarray
    epochs: np.ndarray
    seed: int = 0
    floor: tuple[int, int] = (0, 0)

    @classmethod
    def of_rows(cls, rows: Any) -> "Draw":
        """Asks for rows of the first epoch, outside any run."""
        rows = np.asarray(rows, np.int64)
        return cls(rows=rows, epochs=np.zeros_like(rows))


class Reader(Protocol):
    """A source of examples by row number."""

    @property
    def name(self) -> str:
        """What is read, in one line that changes when the data does."""
        ...

    @property
    def info(self) -> Info:
        """Facts about the examples; may read the first one."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether the length is found by reading, so that reading in order is cheaper."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether rows can only be read forwards."""
        ...

    @property
    def block_rows(self) -> int:
        """How many rows are best gathered in one call; 1 if it makes no difference."""
        ...

    def reach(self, n: int) -> int:
        """Gives `min(n, length)`, reading no further than needed to know it."""
        ...

    def gather(self, draw: Draw) -> Any:
        """Gives the examples stacked along a new first axis."""
        ...

    def first(self) -> Any:
        """Gives the first example as a batch of one; never moves a stream."""
        ...

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Gives a small JSON-able note that makes going on from `floor` cheap, or None."""
        ...

    def resume(self, anchor: Any) -> None:
        """Takes such a note; the examples are the same with and without it."""
        ...


class RandomAccess(abc.ABC):
    """The part of a `Reader` that is the same wherever any row can be read at once."""

    is_lazy = False
    is_stream = False
    block_rows = 1

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def gather(self, draw: Draw) -> Any:
        """Gives the examples stacked along a new first axis."""

    def first(self) -> Any:
        """Gives the first example as a batch of one."""
        return self.gather(Draw.of_rows([0]))

    def reach(self, n: int) -> int:
        """Gives `min(n, length)`."""
        return min(n, len(self))

    def anchor(self, floor: tuple[int, int]) -> None:
        """Gives nothing: any row can be read at once."""
        return

    def resume(self, anchor: Any) -> None:
        """Needs nothing."""
        return


def length(reader: Reader) -> int:
    """Counts the examples of one epoch, reading to the end where that is needed."""
    return reader.reach(sys.maxsize)


def describe(name: str, batch: Any, **facts: Any) -> Info:
    """Reads shapes and dtypes off a batch of any size.

    >>> describe('two', {'x': np.zeros((1, 2, 3))}).shapes
    {'x': (2, 3)}
    """
    fields = {
        key: array
        for key, array in (batch.items() if isinstance(batch, Mapping) else ())
        if isinstance(array, np.ndarray)
    }
    return Info(
        name=name,
        shapes={key: array.shape[1:] for key, array in fields.items()},
        dtypes={key: array.dtype for key, array in fields.items()},
        **facts,
    )


def as_array(value: Any) -> np.ndarray:
    """Makes an array of a field; text and bytes stay Python objects.

    >>> as_array('ab').dtype, as_array(3).dtype
    (dtype('O'), dtype('int64'))
    """
    if isinstance(value, (str, bytes)) or value is None:
        cell = np.empty((), object)
        cell[()] = value
        return cell
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array
