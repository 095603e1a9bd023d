"""Image files of the MNIST family (IDX), the embedded digits, and .npz files."""

import importlib.resources
import io
import re
import struct
import zipfile
from pathlib import Path

import numpy as np

from tekoa.data import files
from tekoa.data.arrays import ArrayReader
from tekoa.data.reader import DataError

N_DIGITS_TRAIN = 1437
_DIGITS_FILE = "digits.npz"

# Values of the IDX type code, after Y. LeCun's description of the format.
_IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_IDX_SPLITS = {"train": ("train",), "test": ("t10k", "test")}


def read_digits(split: str) -> ArrayReader:
    """Reads the embedded digits: 1797 images of 8x8 pixels, 0 to 16.

    Args:
        split: 'train' (the first 1437) or 'test' (the last 360), in the order of the source.

    >>> len(read_digits('train')), len(read_digits('test'))
    (1437, 360)
    """
    rows = {"train": slice(None, N_DIGITS_TRAIN), "test": slice(N_DIGITS_TRAIN, None)}
    if split not in rows:
        raise DataError(f"digits:// has the splits 'train' and 'test'; {split!r} is not one.")
    content = importlib.resources.files("tekoa.data").joinpath(_DIGITS_FILE).read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        fields = {"image": arrays["image"][rows[split]], "label": arrays["label"][rows[split]]}
    fields["label"] = fields["label"].astype(np.int32)
    return ArrayReader(fields, f"digits {split}", n_classes=10, value_range=(0, 16))


def read_npz(path: str) -> ArrayReader:
    """Reads the arrays of an .npz file; the first axis of each counts the examples."""
    files.check_readable(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            fields = {key: arrays[key] for key in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{path} is not a sound .npz file of plain arrays: {error}. "
            "Write it again with numpy.savez, without objects."
        ) from None
    return ArrayReader(fields, Path(path).name)


def read_idx_split(directory: str, split: str) -> ArrayReader:
    """Reads the images and labels of one split from a directory of IDX files.

    The files are those whose names end as MNIST's do (`train-images-idx3-ubyte`,
    `t10k-labels-idx1-ubyte`), with or without .gz and a prefix such as `emnist-letters-`.
    """
    if split not in _IDX_SPLITS:
        raise DataError(f"idx:// has the splits {sorted(_IDX_SPLITS)}; {split!r} is not one.")
    if not Path(directory).is_dir():
        raise DataError(f"idx://: there is no directory {directory!r}.")
    paths = {what: _idx_file(directory, split, what) for what in ("images", "labels")}
    images, labels = read_idx(paths["images"]), read_idx(paths["labels"])
    if len(images) != len(labels):
        raise DataError(
            f"{paths['images']} holds {len(images)} images, but {paths['labels']} holds "
            f"{len(labels)} labels. One of them is of another split or data set."
        )
    if images.ndim == 3:
        images = images[..., None]
    fields = {"image": images, "label": labels.astype(np.int32)}
    return ArrayReader(fields, f"idx {Path(directory).name} {split}")


def _idx_file(directory: str, split: str, what: str) -> Path:
    starts = "|".join(_IDX_SPLITS[split])
    pattern = re.compile(rf"(.*-)?({starts})-{what}[-.]idx\d-ubyte(\.gz)?")
    found = sorted(path for path in Path(directory).iterdir() if pattern.fullmatch(path.name))
    # The same file unpacked beside its .gz is no doubt; two data sets are.
    found = [path for path in found if path.suffix != ".gz" or path.with_suffix("") not in found]
    if len(found) != 1:
        seen = [path.name for path in found] or sorted(p.name for p in Path(directory).iterdir())
        raise DataError(
            f"idx://{directory}/split={split} needs one file of {what} with a name like "
            f"{_IDX_SPLITS[split][0]}-{what}-idx{3 if what == 'images' else 1}-ubyte.gz, "
            f"found {'several' if found else 'none'}: {seen[:8]}."
        )
    return found[0]


def read_idx(path: str | Path) -> np.ndarray:
    """Reads one IDX file, in native byte order.

    Raises:
        DataError: If its magic number or its length is wrong; it says what was seen.
    """
    content = files.read_bytes(path)
    zero, code, n_dims = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    if zero != 0 or code not in _IDX_DTYPES or n_dims == 0:
        raise DataError(
            f"{path} is not an IDX file: it starts with the bytes {content[:4].hex(' ')}, not with "
            "00 00, a type code (08 for uint8) and a number of dimensions."
        )
    header = 4 + 4 * n_dims
    shape = struct.unpack(f">{n_dims}I", content[4:header].ljust(4 * n_dims, b"\0"))
    dtype = np.dtype(_IDX_DTYPES[code])
    expected = header + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise DataError(
            f"{path} has {len(content)} bytes, but its header (shape {shape}, {dtype}) needs "
            f"{expected}. It is cut off or damaged."
        )
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)
