"""Prepared TFDS datasets; those in array_record format are read without TensorFlow."""

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data.readers import files
from tekoa.data.readers.base import DataError, Reader
from tekoa.data.readers.memory import SequenceReader
from tekoa.data.readers.streams import StreamReader, TfDataStream


def read_tfds(rest: str) -> Reader:
    """Reads `[DATA_DIR:]NAME[:VERSION]/split=SPLIT`, the part of the pattern after tfds://.

    The dataset must have been prepared. array_record files are read with random access,
    other formats forwards, by TensorFlow.
    """
    data_dir, name, split = split_pattern(rest)
    directory = _prepared_directory(data_dir, name)
    facts = json.loads((directory / "dataset_info.json").read_text())
    file_format = facts.get("fileFormat", "tfrecord")
    _check_split(split, [entry["name"] for entry in facts.get("splits", [])], rest)
    if file_format != "array_record" and importlib.util.find_spec("tensorflow") is None:
        raise DataError(
            f"tfds://{rest}: {directory} has {file_format} files, which need TensorFlow. "
            "Prepare the dataset again with file_format='array_record', or install tensorflow."
        )
    tfds = files.require("tensorflow_datasets", "tfds", f"tfds://{rest}")
    builder = tfds.builder_from_directory(directory)
    label = f"tfds {name} {builder.info.version} {split}"
    if file_format != "array_record":
        return StreamReader(TfDataStream(builder.as_dataset(split=split)), **_facts(builder.info))
    return SequenceReader(builder.as_data_source(split=split), label, **_facts(builder.info))


def split_pattern(rest: str) -> tuple[Path, str, str]:
    """Splits `[DATA_DIR:]NAME[:VERSION]/split=SPLIT` into directory, name and split.

    >>> split_pattern('/data:mnist:3.0.1/split=train[:10%]')
    (PosixPath('/data'), 'mnist:3.0.1', 'train[:10%]')
    """
    location, separator, split = rest.rpartition("/split=")
    if not separator or not location or not split:
        raise DataError(
            f"tfds://{rest} must have the form tfds://NAME/split=SPLIT or "
            "tfds://DATA_DIR:NAME/split=SPLIT."
        )
    match = re.fullmatch(r"(?:(.+):)?([A-Za-z][^:]*(?::\d[\d.*]*)?)", location)
    data_dir, name = match.groups() if match else (None, location)
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return Path(data_dir or default).expanduser(), name, split


def _prepared_directory(data_dir: Path, name: str) -> Path:
    name, _, version = name.partition(":")
    root = data_dir / name
    directories = sorted(
        (path.parent for path in root.rglob("dataset_info.json")),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)],
    )
    if version:
        directories = [path for path in directories if path.name == version]
    if not directories:
        raise DataError(
            f"TFDS dataset {name!r}{f' version {version}' if version else ''} is not prepared in "
            f"{data_dir}: there is no dataset_info.json under {root}. Prepare it once, with "
            f"network access: tfds.builder({name!r}, data_dir={str(data_dir)!r}, "
            "file_format='array_record').download_and_prepare()."
        )
    configs = sorted({str(path.parent.relative_to(data_dir)) for path in directories})
    if len(configs) > 1:
        raise DataError(f"TFDS dataset {name!r} has several configs. Choose one of {configs}.")
    return directories[-1]


def _check_split(split: str, choices: list[str], rest: str) -> None:
    for part in split.split("+"):
        base = re.split(r"[\[:]", part.strip(), maxsplit=1)[0]
        if base not in (*choices, "all"):
            raise DataError(f"tfds://{rest} has no split {base!r}. Its splits are {choices}.")


def _facts(info: Any) -> dict[str, Any]:
    features = dict(info.features)
    label, image = features.get("label"), features.get("image")
    is_byte = image is not None and np.dtype(image.np_dtype) == np.uint8
    return {
        "n_classes": getattr(label, "num_classes", None),
        "value_range": (0, 255) if is_byte else None,
    }
