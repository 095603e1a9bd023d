"""The training data of `fit` and its validation data: data, data by name, or a fraction."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from tekoa.fitting.data import forms
from tekoa.fitting.data.dataset import Dataset, Names, check_images


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
    train = forms.as_dataset(data, inputs=inputs, targets=targets)
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
        names = {} if forms.is_arrays(part) else {"inputs": inputs, "targets": targets}
        dataset = forms.as_dataset(part, **names, classes=train.classes)
        check_images(train, dataset)
        datasets[name] = dataclasses.replace(dataset, split=train.split_of(dataset))
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
    if forms.is_array(value):
        return True
    return isinstance(value, list) and not (
        value and isinstance(value[0], tuple | Mapping | pathlib.Path)
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
