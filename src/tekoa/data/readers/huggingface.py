"""Datasets of Hugging Face's `datasets` package, as objects or saved on disk."""

from pathlib import Path
from typing import Any

import numpy as np

from tekoa.core import files as core_files
from tekoa.data.batching import stacking
from tekoa.data.readers import files
from tekoa.data.readers.base import DataError, Info, RandomAccess, RowRequest, describe

_SPLIT = "/split="


def is_dataset(data: Any) -> bool:
    """Whether an object is a dataset of the `datasets` package, without importing it."""
    is_own = type(data).__module__.split(".")[0] == "datasets"
    return is_own and (hasattr(data, "features") or isinstance(data, dict))


def read_saved(rest: str) -> "DatasetReader":
    """Reads `DIR` or `DIR/split=SPLIT`, written by `save_to_disk`.

    Raises:
        DataError: If there is no such dataset or split.
    """
    directory, _, split = rest.partition(_SPLIT)
    path = core_files.local_path(directory)
    if not (path / "state.json").is_file() and not (path / "dataset_dict.json").is_file():
        raise DataError(
            f"hf://{rest}: {directory!r} is not a dataset on disk. Save it there once: "
            f"datasets.load_dataset(NAME).save_to_disk({directory!r})."
        )
    datasets = files.require("datasets", "datasets", f"Reading hf://{rest}")
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # Damaged files raise errors of pyarrow, json and others.
        raise DataError(f"Cannot read hf://{rest}: {type(error).__name__}: {error}") from None
    if isinstance(saved, dict):
        saved = _of_split(saved, split, f"hf://{directory}{_SPLIT}")
    elif split:
        raise DataError(f"hf://{rest}: the dataset in {directory!r} has no splits.")
    return DatasetReader(saved, Path(directory).name + (f" {split}" if split else ""))


def _of_split(dataset: Any, split: str, prefix: str) -> Any:
    if split not in dataset:
        names = ", ".join(f"{prefix}{name}" for name in dataset)
        raise DataError(f"The dataset has several splits; use one of {names}.")
    return dataset[split]


class DatasetReader(RandomAccess):
    """Reads the rows of a `datasets.Dataset` as numpy arrays, with the dtypes of its features."""

    def __init__(self, dataset: Any, name: str = "Dataset"):
        if isinstance(dataset, dict):
            raise DataError(
                f"The dataset has the splits {sorted(dataset)}. Pass one of them, such as "
                f"dataset[{sorted(dataset)[0]!r}]."
            )
        if not len(dataset):
            raise DataError(f"{name} contains no examples: its length is 0.")
        # The format of the user is kept: it may contain a transform.
        is_plain = dataset.format["type"] is None
        self._dataset = dataset.with_format("numpy") if is_plain else dataset
        fields = ", ".join(f"{key} {_kind(value)}" for key, value in dataset.features.items())
        self.name = f"{name}: {len(dataset)} rows of {fields}"
        self._classes = getattr(dataset.features.get("label"), "names", None)

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def info(self) -> Info:
        """Shapes and dtypes; the classes, if the label has names."""
        if self._classes is None:
            return describe(self.name, self.first())
        facts = {"classes": list(self._classes)}
        return describe(self.name, self.first(), n_classes=len(self._classes), facts=facts)

    def gather(self, request: RowRequest) -> Any:
        rows = request.rows.tolist()
        columns = self._dataset[rows]
        return {key: _column(column, key, self.name) for key, column in columns.items()}


def _kind(feature: Any) -> str:
    return getattr(feature, "dtype", None) or type(feature).__name__


def _column(column: Any, key: str, name: str) -> np.ndarray:
    """Returns the values of a column as one array; text stays Python objects."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        return column
    is_text = isinstance(column, np.ndarray) and column.dtype.kind in "US"
    return stacking.stack(column.tolist() if is_text else list(column), name, key)
