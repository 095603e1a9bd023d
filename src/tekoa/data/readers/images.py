"""Image files of the MNIST family (IDX), the embedded digits, and .npz files."""

import importlib.resources
import io
import re
import struct
import zipfile
from pathlib import Path

import numpy as np

from tekoa.data.readers import files
from tekoa.data.readers.base import DataError
from tekoa.data.readers.memory import ArrayReader

N_DIGITS_TRAIN = 1437
_DIGITS_FILE = "digits.npz"

# IDX type codes, from Y. LeCun's description of the format.
_IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_IDX_SPLITS = {"train": ("train",), "test": ("t10k", "test")}


def read_digits(split: str) -> ArrayReader:
    """Reads the embedded digits: 1797 images of 8x8 pixels with values from 0 to 16.

    Args:
        split: 'train' (the first 1437) or 'test' (the last 360), in the order of the source.

    >>> len(read_digits('train')), len(read_digits('test'))
    (1437, 360)
    """
    rows = {"train": slice(None, N_DIGITS_TRAIN), "test": slice(N_DIGITS_TRAIN, None)}
    if split not in rows:
        raise DataError(f"digits:// has no split {split!r}. Its splits are {sorted(rows)}.")
    content = importlib.resources.files("tekoa.data").joinpath(_DIGITS_FILE).read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        fields = {"image": arrays["image"][rows[split]], "label": arrays["label"][rows[split]]}
    fields["label"] = fields["label"].astype(np.int32)
    return ArrayReader(fields, f"digits {split}", n_classes=10, value_range=(0, 16))


def read_npz(path: str) -> ArrayReader:
    """Reads the arrays of an .npz file, with examples along the first axis of each."""
    files.check_readable(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            fields = {key: arrays[key] for key in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{path} is not a valid .npz file of plain arrays: {error}. "
            "Write it again with numpy.savez, without object arrays."
        ) from None
    return ArrayReader(fields, Path(path).name)


def read_idx_split(directory: str, split: str) -> ArrayReader:
    """Reads the images and labels of one split from a directory of IDX files.

    File names must end as MNIST's do (`train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`),
    with or without .gz, and may have a prefix such as `emnist-letters-`.
    """
    if split not in _IDX_SPLITS:
        raise DataError(f"idx:// has no split {split!r}. Its splits are {sorted(_IDX_SPLITS)}.")
    if not Path(directory).is_dir():
        raise DataError(f"idx://{directory}: there is no directory {directory!r}.")
    paths = {what: _idx_file(directory, split, what) for what in ("images", "labels")}
    images, labels = read_idx(paths["images"]), read_idx(paths["labels"])
    if len(images) != len(labels):
        raise DataError(
            f"{paths['images']} has {len(images)} images, but {paths['labels']} has "
            f"{len(labels)} labels. One of them belongs to another split or data set."
        )
    if images.ndim == 3:
        images = images[..., None]
    fields = {"image": images, "label": labels.astype(np.int32)}
    return ArrayReader(fields, f"idx {Path(directory).name} {split}")


def _idx_file(directory: str, split: str, what: str) -> Path:
    starts = "|".join(_IDX_SPLITS[split])
    pattern = re.compile(rf"(.*-)?({starts})-{what}[-.]idx\d-ubyte(\.gz)?")
    all_paths = sorted(Path(directory).iterdir())
    matches = [path for path in all_paths if pattern.fullmatch(path.name)]
    # A file may lie beside its .gz form; files of two data sets are ambiguous.
    matches = [p for p in matches if p.suffix != ".gz" or p.with_suffix("") not in matches]
    if len(matches) != 1:
        names = [path.name for path in matches or all_paths]
        raise DataError(
            f"idx://{directory}/split={split} needs exactly one file of {what} with a name like "
            f"{_IDX_SPLITS[split][0]}-{what}-idx{3 if what == 'images' else 1}-ubyte.gz, but "
            f"{'several match' if matches else 'none matches'}: {names[:8]}."
        )
    return matches[0]


def read_idx(path: str | Path) -> np.ndarray:
    """Reads one IDX file into an array in native byte order.

    Raises:
        DataError: If its magic number or its length is wrong.
    """
    content = files.read_bytes(path)
    zero, code, n_dims = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    if zero != 0 or code not in _IDX_DTYPES or n_dims == 0:
        raise DataError(
            f"{path} is not an IDX file: it starts with the bytes {content[:4].hex(' ')} instead "
            "of 00 00, a type code (08 for uint8) and the number of dimensions."
        )
    header = 4 + 4 * n_dims
    shape = struct.unpack(f">{n_dims}I", content[4:header].ljust(4 * n_dims, b"\0"))
    dtype = np.dtype(_IDX_DTYPES[code])
    expected = header + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise DataError(
            f"{path} has {len(content)} bytes, but its header (shape {shape}, {dtype}) needs "
            f"{expected}. It is truncated or corrupt: download or copy it again."
        )
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)
