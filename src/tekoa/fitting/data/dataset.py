"""Data whose batches have inputs and targets; what `fit` trains and evaluates on."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tekoa.core import batch as batch_lib
from tekoa.core import objective
from tekoa.data import DataError, Source, as_batches, interop
from tekoa.data.batching.schedule import Numbers

Names = str | Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Data and how its batches are separated into inputs and targets.

    Attributes:
        source: The examples; None if the data consists of ready batches.
        ready: The ready batches; None if there is a source.
        split: Separates the inputs of a batch from its targets.
        inputs: Names of the input fields, if the fields have names.
        targets: Names of the target fields, if the fields have names.
        classes: The names of the classes, if the targets are text.
        is_pair: Whether the data was passed as arrays, whose fields have no names.
    """

    source: Source | None = None
    ready: Iterable[Any] | None = None
    split: objective.Split = batch_lib.split_batch
    inputs: Names | None = None
    targets: Names | None = None
    classes: Sequence[str] | None = None
    is_pair: bool = False

    def split_of(self, other: "Dataset") -> objective.Split:
        """Returns how batches of other data are separated: like those of this data.

        Arrays have their inputs and targets in known places, so they fit to data with names, and
        the other way round.
        """
        if other.is_pair or (self.is_pair and other.inputs is not None):
            return other.split
        return self.split

    def train_batches(
        self,
        *,
        batch_size: Numbers,
        epochs: int | None,
        seed: int,
        shuffle: bool,
        steps: int | None = None,
    ) -> tuple[Iterable[Any], int | None]:
        """Returns the batches of training, and their number if it is known.

        Args:
            batch_size: As for `fit`.
            epochs: Passes over the data; None for as many as `steps` need, if that is possible.
            seed: As for `fit`.
            shuffle: As for `fit`.
            steps: As for `fit`.

        Raises:
            ValueError: If the data consists of ready batches that cannot be changed or repeated.
        """
        if self.source is not None:
            batches = self.source.batches(
                batch_size, seed=seed, shuffle=shuffle or None, epochs=epochs
            )
            return batches, batches.n_batches
        assert self.ready is not None
        if isinstance(batch_size, Mapping):
            raise ValueError(
                f"batch_size={batch_size} cannot change the rows of ready batches. Pass arrays, a "
                "pattern or a Source."
            )
        is_iterator = isinstance(self.ready, Iterator)
        # Unlike `len`, this accepts a loader of a stream, whose method raises.
        n_batches = operator.length_hint(self.ready) or None
        if epochs is None and steps is not None and n_batches and not is_iterator:
            epochs = -(-steps // n_batches)
        if epochs in (None, 1):
            return self.ready, n_batches
        if is_iterator:
            raise ValueError(
                f"epochs={epochs} needs data that can be read more than once, but "
                f"{type(self.ready).__name__} is an iterator. Pass steps=, or a list, a loader "
                "or arrays."
            )
        return _Repeated(self.ready, epochs), n_batches and n_batches * epochs

    def eval_batches(self, batch_size: int) -> Iterable[Any]:
        """Returns the batches of one pass, in the order of the data; can be read repeatedly."""
        if self.source is not None:
            return _Pass(self.source, batch_size)
        assert self.ready is not None
        return self.ready

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fields of an example; empty if the data consists of ready batches."""
        return {} if self.source is None else dict(self.source.info.shapes)

    @property
    def has_targets(self) -> bool:
        """Whether an example is known to have targets."""
        return self.targets is not None or any(name.startswith("targets") for name in self.shapes)

    def only_inputs(self) -> "Dataset":
        """Returns the data without fields that the model does not receive, such as text."""
        if self.source is None or self.inputs is None:
            return self
        return dataclasses.replace(
            self, source=self.source.map_batch(_Fields(as_names(self.inputs)))
        )


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Keeps only some fields of a batch; can be sent to a process."""

    names: tuple[str, ...]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: batch[name] for name in self.names}


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One pass over a source; the last batch may be short."""

    source: Source
    batch_size: int

    def __iter__(self) -> Iterator[Any]:
        return self.source.batches(self.batch_size, epochs=1, remainder="keep")


class _Repeated:
    """Ready batches, several times over, with a position that counts them."""

    def __init__(self, ready: Iterable[Any], epochs: int):
        self._ready, self._epochs = ready, epochs

    def __iter__(self) -> Iterator[Any]:
        return as_batches(self._chain)

    def _chain(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(
            interop.iterate(self._ready) for _ in range(self._epochs)
        )


def check_images(dataset: Dataset, other: Dataset) -> None:
    """Checks that images in folders have the size of those in the training data.

    Raises:
        DataError: If they have another one.
    """
    shape, other_shape = (
        None if source is None else source.info.facts.get("image_shape")
        for source in (dataset.source, other.source)
    )
    if shape is not None and other_shape is not None and shape != other_shape:
        height, width, channels = shape
        raise DataError(
            f"{other.source!r} has images of {other_shape}, but the training data has {shape}: "
            "height, width, channels. Use the same for both: "
            f"images://DIR/size={height}x{width}/channels={channels}."
        )


def check_rank(dataset: Dataset, other: Dataset) -> None:
    """Checks that inputs have as many axes as those of the training data.

    Raises:
        DataError: If they have more or fewer, such as a single row.
    """
    shape, other_shape = (data.shapes.get("inputs") for data in (dataset, other))
    if shape is not None and other_shape is not None and len(shape) != len(other_shape):
        raise DataError(
            f"The inputs must have shape (rows, {', '.join(map(str, shape))}), as in training, but "
            f"a row has shape {other_shape}. Pass a single row as x[None]."
        )


def as_names(names: Names | None) -> tuple[str, ...]:
    """Returns names of fields as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names or ())
