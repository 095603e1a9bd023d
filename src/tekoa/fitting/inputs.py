"""The data of `fit`: any form that users have, as batches with inputs and targets."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import batch as batch_lib
from tekoa.core import messages, objective
from tekoa.data import DataError, Source, as_batches, as_source, interop
from tekoa.data.readers import huggingface
from tekoa.fitting.classes import encode_classes

Names = str | Sequence[str]

# Fields that are inputs and targets if nothing else is said.
_USUAL_PAIRS = (("image", "label"), ("x", "y"), ("inputs", "targets"))


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
    """

    source: Source | None = None
    ready: Iterable[Any] | None = None
    split: objective.Split = batch_lib.split_batch
    inputs: Names | None = None
    targets: Names | None = None
    classes: Sequence[str] | None = None

    def train_batches(
        self, *, batch_size: int, epochs: int | None, seed: int, shuffle: bool
    ) -> tuple[Iterable[Any], int | None]:
        """Returns the batches of training, and their number if it is known."""
        if self.source is not None:
            batches = self.source.batches(
                batch_size, seed=seed, shuffle=shuffle or None, epochs=epochs
            )
            return batches, batches.n_batches
        assert self.ready is not None
        n_batches = len(self.ready) if hasattr(self.ready, "__len__") else None  # pyright: ignore
        if epochs in (None, 1) or isinstance(self.ready, Iterator):
            if epochs not in (None, 1):
                raise ValueError(
                    f"epochs={epochs} needs data that can be read more than once, but "
                    f"{type(self.ready).__name__} is an iterator. Pass steps=, or a list, a loader "
                    "or arrays."
                )
            return self.ready, n_batches if epochs else None
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

    def only_inputs(self) -> "Dataset":
        """Returns the data without fields that the model does not receive, such as text."""
        if self.source is None or self.inputs is None:
            return self
        return dataclasses.replace(
            self, source=self.source.map_batch(_Fields(_as_names(self.inputs)))
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

    def __init__(self, ready: Iterable[Any], epochs: int | None):
        self._ready, self._epochs = ready, epochs

    def __iter__(self) -> Iterator[Any]:
        return as_batches(self._chain)

    def _chain(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(
            interop.iterate(self._ready) for _ in range(self._epochs or 1)
        )


def as_dataset(
    data: Any,
    *,
    inputs: Names | None = None,
    targets: Names | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Converts the data of `fit` to a `Dataset`.

    Args:
        data: See `fit`.
        inputs: Names of the input fields.
        targets: Names of the target fields.
        classes: Names of the classes if the targets are text; found in the data by default.

    Raises:
        TypeError: If the data has no usable form.
        DataError: If a field does not exist.
    """
    if is_arrays(data):
        data = data if isinstance(data, tuple) else (data, ())
        return _dataset_of_arrays(data, inputs, targets, classes)
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # A DataFrame.
        data = {str(name): np.asarray(data[name]) for name in data.columns}
    if _has_examples(data):
        return _dataset_of_fields(as_source(data), inputs, targets, classes)
    if isinstance(data, (tuple, list)) and _starts_with_number(data):
        raise TypeError(
            "Lists are ready batches. Pass rows of numbers as arrays: (np.asarray(x), "
            "np.asarray(y))."
        )
    if not isinstance(data, Iterable):
        raise TypeError(
            f"data must be arrays, a pattern, a Source or an iterable of batches, got "
            f"{type(data).__name__}: {data!r:.60}"
        )
    split = batch_lib.split_batch
    if inputs is not None or targets is not None:
        split = _named_split(inputs, targets)
    return Dataset(ready=data, split=split, inputs=inputs, targets=targets)


def as_datasets(
    data: Any, validation: Any, *, inputs: Names | None, targets: Names | None, seed: int
) -> tuple[Dataset, dict[str, Dataset]]:
    """Converts the training data and the validation data, by name, of `fit`.

    Args:
        data: See `fit`.
        validation: Data, whose name is ""; a fraction of the training data; data by name; or None.
        inputs: Names of the input fields.
        targets: Names of the target fields.
        seed: Selects the rows of a fraction.

    Raises:
        ValueError: If validation is a number, but no fraction, or a name is not usable.
    """
    train = as_dataset(data, inputs=inputs, targets=targets)
    if validation is None:
        return train, {}
    if isinstance(validation, float):
        train, part = divide(train, validation, seed)
        return train, {"": part}
    if isinstance(validation, int):
        raise ValueError(
            f"validation must be data, or a fraction of it such as 0.1; got {validation}."
        )
    sets = validation if _is_sets(validation, data) else {"": validation}
    datasets = {}
    for name, part in sets.items():
        datasets[name] = as_dataset(part, inputs=inputs, targets=targets, classes=train.classes)
        check_images(train, datasets[name])
    return train, datasets


def _is_sets(validation: Any, data: Any) -> bool:
    """Whether validation data is a dict of data sets, and not one data set as a dict of fields."""
    if not isinstance(validation, Mapping) or not validation:
        return False
    if isinstance(data, Mapping) and set(data) == set(validation):
        return False
    if any(_is_column(value) for value in validation.values()):
        return False
    for name in validation:
        if not isinstance(name, str) or re.fullmatch(r"[\w.-]+", name) is None:
            raise ValueError(
                f"validation: {name!r} is no name for a data set. Use letters, digits, '_', '-', "
                "and '.'."
            )
    return True


def _is_column(value: Any) -> bool:
    """Whether a value is the field of a table: an array, or a list of numbers or text."""
    if _is_array(value):
        return True
    return isinstance(value, list) and not (
        value and isinstance(value[0], tuple | Mapping | pathlib.Path)
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


def divide(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Sets a random part of the examples aside for validation.

    Raises:
        ValueError: If the fraction is not between 0 and 1, or the data has no examples to choose.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation must be a fraction between 0 and 1, or data; got {fraction}.")
    if dataset.source is None:
        raise ValueError(
            f"validation={fraction} needs examples to choose from, but the data consists of ready "
            "batches. Pass the validation data itself."
        )
    rest, part = dataset.source.divide(fraction, seed=seed)
    return dataclasses.replace(dataset, source=rest), dataclasses.replace(dataset, source=part)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0


def _starts_with_number(data: Any) -> bool:
    return isinstance(next(iter(jax.tree.leaves(data)), None), int | float)


def is_arrays(data: Any) -> bool:
    """Whether data is an array of inputs, or (inputs, targets), each an array or a tree of them."""
    if not isinstance(data, tuple):
        return _is_array(data)
    leaves = jax.tree.leaves(data)
    return len(data) == 2 and bool(leaves) and all(map(_is_array, leaves))


def _has_examples(data: Any) -> bool:
    """Whether the data consists of examples, so that batches must be formed."""
    if isinstance(data, (Source, str, pathlib.Path, Mapping)) or hasattr(data, "as_numpy_iterator"):
        return True
    if huggingface.is_dataset(data):
        return True
    if isinstance(data, (list, tuple)):
        return bool(data) and all(isinstance(item, (str, pathlib.Path)) for item in data)
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _dataset_of_arrays(
    pair: Any, inputs: Names | None, targets: Names | None, classes: Sequence[str] | None
) -> Dataset:
    if inputs is not None or targets is not None:
        raise ValueError("inputs= and targets= name fields, but the data is a pair of arrays.")
    structure = jax.tree.structure(pair)

    def split(batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return batch_lib.split_batch(structure.unflatten([batch[k] for k in sorted(batch)]))

    fields = {}
    for name, part in zip(("inputs", "targets"), map(jax.tree.leaves, pair), strict=True):
        # In the order of the leaves, also after sorting.
        fields |= {name if len(part) == 1 else f"{name} {i:03d}": x for i, x in enumerate(part)}
    source, classes = encode_classes(as_source(fields), "targets", classes)
    _ = source.info  # Reads an example: unknown classes are reported now.
    return Dataset(source=source, split=split, classes=classes)


def _dataset_of_fields(
    source: Source, inputs: Names | None, targets: Names | None, classes: Sequence[str] | None
) -> Dataset:
    dtypes = source.info.dtypes
    names = set(dtypes)
    if not names or all(name.isdigit() for name in names):  # Examples are tuples.
        return Dataset(source=source)
    if inputs is None and targets is None:
        pair = next((pair for pair in _USUAL_PAIRS if names.issuperset(pair)), None)
        if pair is None and (text := [n for n, dtype in dtypes.items() if dtype.kind in "OUS"]):
            raise DataError(
                f"The data has the fields {', '.join(dtypes)}, of which {', '.join(text)} hold "
                f"text. Name the one to predict, such as targets={text[0]!r}."
            )
        if pair is None:
            return Dataset(source=source)
        inputs, targets = pair
    _check_names(inputs, targets, dtypes)
    source, classes = encode_classes(source, targets, classes)
    _ = source.info  # Reads an example: unknown classes are reported now.
    if inputs is None:
        used = {targets} if isinstance(targets, str) else set(targets or ())
        inputs = [
            name for name, dtype in dtypes.items() if name not in used and dtype.kind in "biuf"
        ]
        if text := sorted(names - used - set(inputs)):
            raise DataError(
                f"The fields {text} hold text and cannot be inputs. Pass inputs=, with the names "
                "of the fields to use."
            )
    split = _named_split(inputs, targets)
    return Dataset(source=source, split=split, inputs=inputs, targets=targets, classes=classes)


def _check_names(inputs: Names | None, targets: Names | None, fields: Iterable[str]) -> None:
    for name in (*_as_names(inputs), *_as_names(targets)):
        if name not in fields:
            raise DataError(
                f"The data has no field {name!r}.{messages.did_you_mean(name, fields)} It has "
                f"{', '.join(fields)}."
            )


def _named_split(
    inputs: Names | None, targets: Names | None
) -> Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Returns a split of dict batches by the names of fields."""

    def split(batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        chosen_inputs = inputs
        if chosen_inputs is None:
            chosen_inputs = [name for name in batch if name not in _as_names(targets)]
        return _select(batch, chosen_inputs), _select(batch, targets)

    return split


def _select(batch: Any, names: Names | None) -> tuple[Any, ...]:
    """Returns the named fields; several fields of one number per row become one matrix."""
    if names is None:
        return ()
    if isinstance(names, str):
        return (batch[names],)
    fields = tuple(batch[name] for name in names)
    if len(fields) > 1 and all(field.ndim == 1 for field in fields):
        stack = np.stack if isinstance(fields[0], np.ndarray) else jax.numpy.stack
        return (stack([field.astype(np.float32) for field in fields], axis=1),)
    return fields


def _as_names(names: Names | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())
