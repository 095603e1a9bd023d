"""Prepared TFDS datasets; those in array_record format are read without TensorFlow."""

import functools
import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.core import files as core_files
from tekoa.data.readers import files
from tekoa.data.readers.base import DataError, Reader
from tekoa.data.readers.memory import SequenceReader
from tekoa.data.readers.streams import StreamReader, TfDataStream

_log = logging.getLogger("tekoa")


def read_tfds(rest: str) -> Reader:
    """Reads `[DATA_DIR:]NAME[:VERSION]/split=SPLIT`, the part of the pattern after tfds://.

    The dataset must have been prepared. array_record files are read with random access,
    other formats forwards, by TensorFlow. Text and other fields that are not numbers are left
    out, with one line in the log.
    """
    data_dir, name, split = split_pattern(rest)
    directory = _prepared_directory(data_dir, name)
    try:
        facts = core_files.read_json(directory / "dataset_info.json", max_bytes=2**26)
        file_format = facts.get("fileFormat", "tfrecord")
        choices = [entry["name"] for entry in facts.get("splits", [])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{directory / 'dataset_info.json'} cannot be read: {error!r}. Prepare the dataset "
            "again."
        ) from None
    _check_split(split, choices, rest)
    if file_format != "array_record" and importlib.util.find_spec("tensorflow") is None:
        raise DataError(
            f"tfds://{rest}: {directory} has {file_format} files, which need TensorFlow. "
            "Prepare the dataset again with file_format='array_record', or install tensorflow."
        )
    tfds = files.require("tensorflow_datasets", "tfds", f"tfds://{rest}")
    builder = tfds.builder_from_directory(directory)
    label = f"tfds {name} {builder.info.version} {split}"
    features = dict(builder.info.features)
    names = [name for name, feature in features.items() if _is_numeric(feature.np_dtype)]
    decode = functools.partial(_select, names) if len(names) < len(features) else None
    if decode is not None:
        left_out = ", ".join(sorted(features.keys() - set(names)))
        _log.warning("tfds://%s: left out the fields that are not numbers: %s.", rest, left_out)
    if file_format != "array_record":
        stream = TfDataStream(builder.as_dataset(split=split))
        return StreamReader(stream, decode, **_facts(features))
    return SequenceReader(builder.as_data_source(split=split), label, decode, **_facts(features))


def _is_numeric(dtype: Any) -> bool:
    """Whether a feature holds numbers; `dtype` is its type, or those of its parts by name."""
    if isinstance(dtype, dict):
        return all(map(_is_numeric, dtype.values()))
    return np.dtype(dtype).kind not in "OSU"


def _select(names: list[str], example: dict[str, Any]) -> dict[str, Any]:
    return {name: example[name] for name in names}


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
    return core_files.local_path(data_dir or default), name, split


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
        default = f"{name}/{_default_config(root)}"
        if default not in configs:
            raise DataError(f"TFDS dataset {name!r} has several configs. Choose one of {configs}.")
        directories = [path for path in directories if path.parent == data_dir / default]
    return directories[-1]


def _default_config(root: Path) -> str | None:
    """Returns the config that TFDS uses if none is named; it is noted where they are prepared."""
    try:
        facts = core_files.read_json(root / ".config" / "metadata.json", max_bytes=2**26)
        return facts["default_config_name"]
    except (FileNotFoundError, KeyError):
        return None


def _check_split(split: str, choices: list[str], rest: str) -> None:
    for part in split.split("+"):
        base = re.split(r"[\[:]", part.strip(), maxsplit=1)[0]
        if base not in (*choices, "all"):
            raise DataError(f"tfds://{rest} has no split {base!r}. Its splits are {choices}.")


def _facts(features: dict[str, Any]) -> dict[str, Any]:
    label, image = features.get("label"), features.get("image")
    is_byte = image is not None and np.dtype(image.np_dtype) == np.uint8
    return {
        "n_classes": getattr(label, "num_classes", None),
        "value_range": (0, 255) if is_byte else None,
    }
