"""Converts data in any form that users have to a `Dataset`."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import batch as batch_lib
from tekoa.core import messages
from tekoa.data import DataError, Source, as_source
from tekoa.data.readers import huggingface
from tekoa.fitting.data.classes import encode_classes
from tekoa.fitting.data.dataset import Dataset, Names, as_names

# Fields that are inputs and targets if nothing else is said.
_USUAL_PAIRS = (("image", "label"), ("x", "y"), ("inputs", "targets"))


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
    data = _without_frames(data)
    if is_arrays(data):
        data = data if isinstance(data, tuple) else (data, ())
        return _dataset_of_arrays(data, inputs, targets, classes)
    if is_frame(data):
        data = {str(name): np.asarray(data[name]) for name in data.columns}
    if _has_examples(data):
        return _dataset_of_fields(as_source(data), inputs, targets, classes)
    if isinstance(data, (tuple, list)) and _starts_with_number(data):
        raise TypeError(
            "Lists are ready batches. Pass rows of numbers as arrays: (np.asarray(x), "
            "np.asarray(y))."
        )
    if not isinstance(data, Iterable):
        hint = " Pass what it returns." if callable(data) else ""
        raise TypeError(
            f"data must be arrays, a pattern, a Source or an iterable of batches, got "
            f"{type(data).__name__}.{hint}"
        )
    split = batch_lib.split_batch
    if inputs is not None or targets is not None:
        split = _named_split(inputs, targets)
    return Dataset(ready=data, split=split, inputs=inputs, targets=targets)


def is_frame(value: Any) -> bool:
    """Whether a value is a DataFrame."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _without_frames(data: Any) -> Any:
    """Returns a pair with its DataFrames and Series as arrays; other data unchanged."""
    if not isinstance(data, tuple) or len(data) != 2:
        return data
    return tuple(matrix_of(part) if hasattr(part, "to_numpy") else part for part in data)


def matrix_of(frame: Any) -> np.ndarray:
    """Returns the values of a DataFrame or Series as an array.

    Raises:
        DataError: If some columns of a DataFrame are not numbers.
    """
    values = frame.to_numpy()
    if is_frame(frame) and values.dtype.kind not in "biuf":
        kinds = {str(name): np.asarray(frame[name]).dtype.kind for name in frame.columns}
        text = [name for name, kind in kinds.items() if kind not in "biuf"]
        raise DataError(
            f"The columns {messages.some_of(text)} hold no numbers and cannot be inputs. Leave "
            "them out, or encode them as numbers."
        )
    return values


def is_array(value: Any) -> bool:
    """Whether a value is an array with at least one axis."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0


def _starts_with_number(data: Any) -> bool:
    return isinstance(next(iter(jax.tree.leaves(data)), None), int | float)


def is_arrays(data: Any) -> bool:
    """Whether data is an array of inputs, or (inputs, targets), each an array or a tree of them."""
    if not isinstance(data, tuple):
        return is_array(data)
    leaves = jax.tree.leaves(data)
    return len(data) == 2 and bool(leaves) and all(map(is_array, leaves))


def _has_examples(data: Any) -> bool:
    """Whether the data consists of examples, so that batches must be formed."""
    if isinstance(data, (Source, str, pathlib.Path, Mapping)) or hasattr(data, "as_numpy_iterator"):
        return True
    if huggingface.is_dataset(data):
        return True
    if isinstance(data, (list, tuple)):
        is_paths = all(isinstance(item, (str, pathlib.Path)) for item in data)
        return bool(data) and (is_paths or _is_example(data[0]))
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _is_example(item: Any) -> bool:
    """Whether an item of a list is an example, such as an image and its class, and no batch."""
    leaves = jax.tree.leaves(item) if isinstance(item, (tuple, Mapping)) else []
    return any(np.ndim(leaf) == 0 for leaf in leaves)


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
    return Dataset(source=source, split=split, classes=classes, is_pair=True)


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
                f"The fields {text} hold text and cannot be inputs. Name the fields to use, such "
                f"as inputs={inputs}."
            )
    used = {*as_names(inputs), *as_names(targets)}
    if unused := tuple(n for n, dtype in dtypes.items() if dtype.kind in "OUS" and n not in used):
        source = source.map_batch(_Without(unused))
    split = _named_split(inputs, targets)
    return Dataset(source=source, split=split, inputs=inputs, targets=targets, classes=classes)


@dataclasses.dataclass(frozen=True)
class _Without:
    """Removes fields from a batch; can be sent to a process."""

    fields: tuple[str, ...]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in self.fields}


def _check_names(inputs: Names | None, targets: Names | None, fields: Iterable[str]) -> None:
    for name in (*as_names(inputs), *as_names(targets)):
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
            chosen_inputs = [name for name in batch if name not in as_names(targets)]
        return _select(batch, chosen_inputs, least=1), _select(batch, targets, least=2)

    return split


def _select(batch: Any, names: Names | None, *, least: int) -> tuple[Any, ...]:
    """Returns the named fields; a list of fields of one number per row becomes a matrix.

    Args:
        batch: The batch.
        names: The name of one field, or a list of names.
        least: The smallest number of fields that become a matrix.
    """
    if names is None:
        return ()
    if isinstance(names, str):
        return (batch[names],)
    fields = tuple(batch[name] for name in names)
    if len(fields) >= least and all(field.ndim == 1 for field in fields):
        stack = np.stack if isinstance(fields[0], np.ndarray) else jax.numpy.stack
        return (stack([field.astype(np.float32) for field in fields], axis=1),)
    return fields
