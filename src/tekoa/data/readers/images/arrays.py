"""Image files of the MNIST family (IDX), the embedded digits, and .npz files."""

import importlib.resources
import io
import math
import re
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from tekoa.core import files as core_files
from tekoa.data.readers import files
from tekoa.data.readers.base import DataError
from tekoa.data.readers.memory import ArrayReader

N_DIGITS_TRAIN = 1437
# The highest compression ratio of the methods that zip files use, rounded up.
_MAX_RATIO = 2**11
_read_header_2 = np.lib.format.read_array_header_2_0
_DIGITS_FILE = "digits.npz"

# IDX type codes, from Y. LeCun's description of the format.
_IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_IDX_MAX_DIMS = 8
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
    size = files.check_readable(path)
    # All that zipfile and numpy raise for malformed bytes.
    malformed = (ValueError, OSError, EOFError, LookupError, RuntimeError, MemoryError)
    malformed = (*malformed, SyntaxError, tokenize.TokenError, zipfile.BadZipFile)
    try:
        with files.open_file(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.compress_size for member in members) > size:
                raise ValueError("its members are larger than the file")
            fields = {m.filename.removesuffix(".npy"): _read_member(archive, m) for m in members}
    except (*malformed, zlib.error, struct.error) as error:
        raise DataError(
            f"{path} is not a valid .npz file of plain arrays: {error}. "
            "Write it again with numpy.savez, without object arrays."
        ) from None
    return ArrayReader(fields, Path(path).name)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Reads an array of an .npz file after comparing its header with the size of its data."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        is_first = version == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if is_first else _read_header_2
        shape, _, dtype = read_header(file)
        expected = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError(f"{member.filename!r} is an object array")
    is_possible = member.file_size <= _MAX_RATIO * max(1, member.compress_size)
    if expected != member.file_size or not is_possible:
        raise ValueError(
            f"{member.filename!r} has the shape {shape} and dtype {dtype}, which need {expected} "
            f"bytes, but {member.file_size} are stored, in {member.compress_size} bytes of the file"
        )
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_idx_split(directory: str, split: str) -> ArrayReader:
    """Reads the images and labels of one split from a directory of IDX files.

    File names must end as MNIST's do (`train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`),
    with or without .gz, and may have a prefix such as `emnist-letters-`.
    """
    if split not in _IDX_SPLITS:
        raise DataError(f"idx:// has no split {split!r}. Its splits are {sorted(_IDX_SPLITS)}.")
    if not core_files.local_path(directory).is_dir():
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
    with files.open_unpacked(path) as file:
        magic = file.read(4)
        zero, code, n_dims = struct.unpack(">HBB", magic.ljust(4, b"\xff"))
        if zero != 0 or code not in _IDX_DTYPES or not 0 < n_dims <= _IDX_MAX_DIMS:
            raise DataError(
                f"{path} is not an IDX file: it starts with the bytes {magic.hex(' ')} instead "
                "of 00 00, a type code (08 for uint8) and the number of dimensions."
            )
        sizes = file.read(4 * n_dims)
        shape = struct.unpack(f">{n_dims}I", sizes.ljust(4 * n_dims, b"\0"))
        dtype = np.dtype(_IDX_DTYPES[code])
        n_bytes = dtype.itemsize * math.prod(shape)
        # One byte more, to notice a file that is too long.
        content = files.read_at_most(file, n_bytes + 1)
    if len(content) != n_bytes:
        header = len(magic) + len(sizes)
        more = "more than " if len(content) > n_bytes else ""
        raise DataError(
            f"{path} has {more}{header + min(len(content), n_bytes)} bytes, but its header (shape "
            f"{shape}, {dtype}) needs {4 + 4 * n_dims + n_bytes}. It is truncated or corrupt: "
            "download or copy it again."
        )
    try:
        values = np.frombuffer(content, dtype).reshape(shape)
    except ValueError as error:  # One size is 0, the others are absurd.
        raise DataError(f"{path}: the shape {shape} of its header is invalid: {error}.") from None
    return values.astype(dtype.newbyteorder("="), copy=False)
