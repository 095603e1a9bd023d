"""The `Reader` interface: what each kind of storage provides to be shuffled, batched and resumed.

A reader knows nothing about batches. It answers two questions: how many examples there are,
and which examples are in given rows. Files, arrays, streams and views implement it; the
modules in `batching` call it.
"""

import abc
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from tekoa.core import messages

Batch = dict[str, np.ndarray]
Example = dict[str, Any]


class DataError(ValueError):
    """The data cannot be read as requested; the message names the pattern, file and position."""


class ChangedDataError(DataError):
    """A saved data position belongs to another source, seed, batch size or order."""


def other_position(state: Any, expected: str) -> ChangedDataError:
    """Returns the error for a saved position that belongs to another kind of data.

    Args:
        state: The saved position.
        expected: The kind of data that is trained on now.

    >>> print(other_position({'next': 3}, 'a Source'))
    The saved data position is one of a list of batches, but the data is a Source now. Resume with
    the kind of data that the run was started with. To train a stored model on other data, pass
    tekoa.load(directory, model) as the model.
    """
    fields = set(state) if isinstance(state, Mapping) else set()
    kinds = {"next": "a list of batches", "fingerprint": "a Source", "base64": "a grain DataLoader"}
    other = f"another iterator, with the entries {sorted(map(str, fields))}"
    kind = next((text for field, text in kinds.items() if field in fields), other)
    return ChangedDataError(
        f"The saved data position is one of {kind}, but the data is {expected} now. Resume with "
        "the kind of data that the run was started with. To train a stored model on other data, "
        "pass tekoa.load(directory, model) as the model."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Facts about a source's examples, for building a model that fits them.

    Attributes:
        name: One-line description of the data.
        shapes: Shape of each field of an example.
        dtypes: Data type of each field.
        n_classes: Number of values of the label (or token), if known.
        value_range: Lowest and highest pixel value of `image`, if known.
        facts: Other facts that depend on the kind of data, such as `end_id` of a vocabulary.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    dtypes: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)
    n_classes: int | None = None
    value_range: tuple[float, float] | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("shapes", "dtypes"):
            object.__setattr__(self, name, _Fields(getattr(self, name), self.name))


class _Fields(dict[str, Any]):
    """What is known about each field; a model that needs another one is told which there are."""

    def __init__(self, fields: Mapping[str, Any], source: str):
        super().__init__(fields)
        self._source = source

    def __missing__(self, name: str) -> Any:
        raise DataError(
            f"{self._source} has no field {name!r}, only {messages.some_of(list(self))}. Name a "
            "field that is there in the model file, or use other data."
        )


class RowRequest(NamedTuple):
    """Examples requested from a reader in one call.

    Attributes:
        rows: Row of each example within its epoch, int64.
        epochs: Epoch of each example.
        seed: Seed of the run, for readers whose examples differ by epoch.
        floor: Epoch and row; neither this nor any later request needs rows below it.
    """

    rows: np.ndarray
    epochs: np.ndarray
    seed: int = 0
    floor: tuple[int, int] = (0, 0)

    @classmethod
    def of_rows(cls, rows: Any) -> "RowRequest":
        """Creates a request for rows of the first epoch, independent of any run."""
        rows = np.asarray(rows, np.int64)
        return cls(rows=rows, epochs=np.zeros_like(rows))

    def one_by_one(self) -> Iterator["RowRequest"]:
        """Yields a request for each of the examples."""
        for at in range(len(self.rows)):
            one = slice(at, at + 1)
            yield self._replace(rows=self.rows[one], epochs=self.epochs[one])


class Reader(Protocol):
    """A source of examples by row number."""

    @property
    def name(self) -> str:
        """One-line description that changes when the data does."""
        ...

    @property
    def info(self) -> Info:
        """Facts about the examples; may read the first one."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether the length is only known after reading, so that reading in order is cheaper."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether rows can only be read forwards."""
        ...

    @property
    def block_rows(self) -> int:
        """Best number of rows to gather in one call; 1 if it makes no difference."""
        ...

    def reach(self, n: int) -> int:
        """Returns `min(n, length)`, reading no further than necessary."""
        ...

    def gather(self, request: RowRequest) -> Any:
        """Returns the examples stacked along a new first axis."""
        ...

    def first(self) -> Any:
        """Returns the first example as a batch of one; never advances a stream."""
        ...

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Returns small JSON-able data that makes resuming at `floor` cheap, or None."""
        ...

    def resume(self, anchor: Any) -> None:
        """Uses an anchor to resume faster; the examples are the same without it."""
        ...


class RandomAccess(abc.ABC):
    """The methods of a `Reader` that are the same for all data with random access."""

    is_lazy = False
    is_stream = False
    block_rows = 1

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def gather(self, request: RowRequest) -> Any:
        """Returns the examples stacked along a new first axis."""

    def first(self) -> Any:
        return self.gather(RowRequest.of_rows([0]))

    def reach(self, n: int) -> int:
        return min(n, len(self))

    def anchor(self, floor: tuple[int, int]) -> None:
        """Returns None: any row can be read directly."""
        return

    def resume(self, anchor: Any) -> None:
        """Does nothing: any row can be read directly."""
        return


def length(reader: Reader) -> int:
    """Counts the examples of one epoch, reading to the end if necessary."""
    return reader.reach(sys.maxsize)


def describe(name: str, batch: Any, **facts: Any) -> Info:
    """Creates an `Info` with the shapes and dtypes of a batch of any size.

    >>> describe('two', {'x': np.zeros((1, 2, 3))}).shapes
    {'x': (2, 3)}
    """
    fields = batch.items() if isinstance(batch, Mapping) else ()
    arrays = {key: field for key, field in fields if isinstance(field, np.ndarray)}
    shapes = {key: array.shape[1:] for key, array in arrays.items()}
    dtypes = {key: array.dtype for key, array in arrays.items()}
    return Info(name=name, shapes=shapes, dtypes=dtypes, **facts)


def decode_row(decode: Callable[[Any], Any] | None, element: Any, name: str, row: int) -> Any:
    """Decodes an element of a source; an error names the source and the row."""
    try:
        return element if decode is None else decode(element)
    except DataError as error:
        raise DataError(f"{name}, row {row}: {error}") from None


def as_array(value: Any) -> np.ndarray:
    """Converts a field to an array; text and bytes stay Python objects.

    >>> as_array('ab').dtype, as_array(3).dtype
    (dtype('O'), dtype('int64'))
    """
    if isinstance(value, (str, bytes)) or value is None:
        cell = np.empty((), object)
        cell[()] = value
        return cell
    array = tensor_as_array(value) if hasattr(value, "detach") else np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


def tensor_as_array(tensor: Any) -> np.ndarray:
    """Returns a tensor of torch as an array, which shares its memory if possible."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":  # numpy does not have it.
        import ml_dtypes

        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.numpy()
