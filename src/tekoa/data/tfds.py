"""Prepared TFDS datasets, read without TensorFlow where they are array_record."""

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import files
from tekoa.data.reader import DataError, Reader
from tekoa.data.sequences import SequenceReader
from tekoa.data.streams import StreamReader, TfDataStream


def read_tfds(rest: str) -> Reader:
    """Reads `[DATA_DIR:]NAME[:VERSION]/split=SPLIT`, the part of the pattern after tfds://.

    The dataset must have been prepared. array_record files are read with random access;
    others forwards, by TensorFlow.
    """
    data_dir, name, split = split_pattern(rest)
    directory = _prepared_directory(data_dir, name)
    facts = json.loads((directory / "dataset_info.json").read_text())
    file_format = facts.get("fileFormat", "tfrecord")
    _check_split(split, [entry["name"] for entry in facts.get("splits", [])], rest)
    if file_format != "array_record" and importlib.util.find_spec("tensorflow") is None:
        raise DataError(
            f"tfds://{rest}: {directory} holds {file_format} files, which only TensorFlow reads. "
            "Prepare the dataset again with file_format='array_record', or install tensorflow."
        )
    tfds = files.require("tensorflow_datasets", "tfds", f"tfds://{rest}")
    builder = tfds.builder_from_directory(directory)
    label = f"tfds {name} {builder.info.version} {split}"
    if file_format != "array_record":
        return StreamReader(TfDataStream(builder.as_dataset(split=split)), **_facts(builder.info))
    return SequenceReader(builder.as_data_source(split=split), label, **_facts(builder.info))


def split_pattern(rest: str) -> tuple[Path, str, str]:
    """Takes `[DATA_DIR:]NAME[:VERSION]/split=SPLIT` apart.

    >>> split_pattern('/data:mnist:3.0.1/split=train[:10%]')
    (PosixPath('/data'), 'mnist:3.0.1', 'train[:10%]')
    """
    place, mark, split = rest.rpartition("/split=")
    if not mark or not place or not split:
        raise DataError(
            f"tfds://{rest} must have the form tfds://NAME/split=SPLIT or "
            "tfds://DATA_DIR:NAME/split=SPLIT."
        )
    found = re.fullmatch(r"(?:(.+):)?([A-Za-z][^:]*(?::\d[\d.*]*)?)", place)
    data_dir, name = found.groups() if found else (None, place)
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return Path(data_dir or default).expanduser(), name, split


def _prepared_directory(data_dir: Path, name: str) -> Path:
    name, _, version = name.partition(":")
    root = data_dir / name
    found = sorted(
        (path.parent for path in root.rglob("dataset_info.json")),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)],
    )
    if version:
        found = [path for path in found if path.name == version]
    if not found:
        raise DataError(
            f"TFDS dataset {name!r}{f' version {version}' if version else ''} is not prepared in "
            f"{data_dir}: there is no dataset_info.json under {root}. Prepare it once, with "
            f"network: tfds.builder({name!r}, data_dir={str(data_dir)!r}, "
            "file_format='array_record').download_and_prepare()."
        )
    configs = sorted({str(path.parent.relative_to(data_dir)) for path in found})
    if len(configs) > 1:
        raise DataError(f"TFDS dataset {name!r} has several configs; name one of {configs}.")
    return found[-1]


def _check_split(split: str, known: list[str], rest: str) -> None:
    for part in split.split("+"):
        base = re.split(r"[\[:]", part.strip(), maxsplit=1)[0]
        if base not in (*known, "all"):
            raise DataError(f"tfds://{rest}: there is no split {base!r}; there are {known}.")


def _facts(info: Any) -> dict[str, Any]:
    features = dict(info.features)
    label, image = features.get("label"), features.get("image")
    is_byte = image is not None and np.dtype(image.np_dtype) == np.uint8
    return {
        "n_classes": getattr(label, "num_classes", None),
        "value_range": (0, 255) if is_byte else None,
    }
