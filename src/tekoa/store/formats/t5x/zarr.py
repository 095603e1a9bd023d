"""The zarr arrays of a T5X checkpoint, written and read with TensorStore.

A checkpoint may come from anywhere, so a spec found in it is never passed to TensorStore. A
new spec is built from the checked path, and shape, dtype, chunks and compressor are read from
`.zarray` and checked before anything is allocated.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from tekoa.core import files, messages
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.formats import arrays_read, arrays_write, leaves

_TARGET_BYTES = 64 * 2**20
_COMPRESSOR = {"id": "gzip", "level": 1}
_DRIVERS = ("file", "gfile", "gcs")
_MAX_ZARRAY_BYTES = 2**20
# The highest compression ratio of gzip and zstd: zstd stores a run of 128 KiB in 4 bytes.
_MAX_RATIO = 2**15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The checked spec of a zarr array in a checkpoint.

    Attributes:
        path: Relative to the step, without a trailing slash.
        shape: The shape in the msgpack file.
        dtype: Name of a numpy or ml_dtypes dtype.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str


def choose_chunk_shape(shape: tuple[int, ...], target_elements: int) -> tuple[int, ...]:
    """Shrinks the largest dimension to its next divisor until a chunk is small enough.

    Raises:
        IndexError: If a dimension is 0, as in T5X.

    >>> choose_chunk_shape((30, 8, 8), 100)
    (6, 4, 4)
    """
    chunk = list(shape)
    if 0 in chunk:
        raise IndexError(f"An array of shape {shape} has no elements and so no chunks.")
    while math.prod(chunk) > target_elements:
        i = chunk.index(max(chunk))
        if chunk[i] == 1:
            break
        chunk[i] = _next_divisor(shape[i], chunk[i])
    return tuple(chunk)


def _next_divisor(n: int, below: int) -> int:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return max(d for d in small + [n // d for d in small] if d < below)


def is_spec(node: Any) -> bool:
    """Returns whether a map in the msgpack file is the spec of a zarr array."""
    return isinstance(node, dict) and {"driver", "kvstore", "metadata"} <= node.keys()


def is_sharded(array: Any) -> bool:
    """Returns whether an array is split over several devices."""
    return isinstance(array, jax.Array) and not array.is_fully_replicated


def make_spec(path: str, array: np.ndarray | jax.Array) -> dict[str, Any]:
    """Returns the spec of an array for the msgpack file; a shard is a chunk, as in T5X."""
    if isinstance(array, jax.Array) and is_sharded(array):
        chunks = array.sharding.shard_shape(array.shape)
    else:
        chunks = choose_chunk_shape(array.shape, _TARGET_BYTES // array.dtype.itemsize)
    return {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "chunks": list(chunks),
            "compressor": dict(_COMPRESSOR),
            "shape": list(array.shape),
        },
    }


def write(
    directory: pathlib.Path,
    spec: dict[str, Any],
    array: np.ndarray | jax.Array,
    *,
    is_writer: bool,
) -> list[Any]:
    """Starts writing this process's part of an array according to its spec; returns futures."""
    import tensorstore as ts

    shards = list(arrays_write.own_shards(array, is_writer))
    if not shards:
        return []

    spec = {
        **spec,
        "kvstore": {"driver": "file", "path": f"{directory}/{spec['kvstore']['path']}"},
        # T5X stores chunks of zeros too, instead of relying on a fill value.
        "store_data_equal_to_fill_value": True,
    }
    # Several processes create an array together; whoever comes later opens it.
    store = ts.open(spec, create=True, open=True).result()
    return [store[index].write(data) for index, data in shards]


def parse_spec(node: dict[str, Any], where: str) -> Spec:
    """Checks a spec found in a checkpoint.

    Args:
        node: The map in the msgpack file.
        where: The file and leaf, for messages.

    Raises:
        errors.UnsafeError: If it uses another driver or a path outside the step.
        errors.DamagedError: If it is malformed.
    """
    kvstore, metadata = node["kvstore"], node["metadata"]
    if not isinstance(kvstore, dict) or not isinstance(metadata, dict):
        raise errors.DamagedError(f"{where}: the spec of the array is malformed.")
    if node["driver"] != "zarr" or kvstore.get("driver") not in _DRIVERS:
        raise errors.UnsafeError(
            f"{where}: uses driver {node['driver']!r} over {kvstore.get('driver')!r}; only 'zarr' "
            f"over {', '.join(_DRIVERS)} is allowed."
        )
    # TensorStore before 0.1.14 stored the path beside the kvstore.
    path = kvstore.get("path", node.get("path"))
    if not isinstance(path, str) or not paths.is_safe_path(path.removesuffix("/")):
        raise errors.UnsafeError(
            f"{where}: its path {path!r} is not inside the checkpoint; nothing was opened."
        )
    dtype = node.get("dtype", metadata.get("dtype"))
    if dtype in ("uint16", "<u2"):
        raise errors.DamagedError(
            f"{where}: is stored as uint16, which version 2 uses for bfloat16; this is not "
            "supported."
        )
    dtype = _parse_dtype(dtype, where)
    shape = metadata.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise errors.DamagedError(f"{where}: has the invalid shape {shape!r}.")
    return Spec(path=path.removesuffix("/"), shape=tuple(shape), dtype=dtype.name)


def open_array(directory: pathlib.Path, spec: Spec) -> Any:
    """Opens an array after checking its files; returns a TensorStore.

    Raises:
        errors.DamagedError: If files are missing, or do not match the spec.
        errors.UnsafeError: If a file is a link, or the sizes are impossible.
    """
    import tensorstore as ts

    check_array(directory, spec)
    folder = directory / spec.path
    kvstore = {"driver": "file", "path": f"{folder.absolute()}/"}
    opening = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True)
    return arrays_read.finish(opening, str(folder))


def check_array(directory: pathlib.Path, spec: Spec) -> None:
    """Checks the files of an array, without reading its values; raises as `open_array`."""
    folder = directory / spec.path
    _check_zarray(folder, spec, _file_sizes(directory, folder))


def _file_sizes(directory: pathlib.Path, folder: pathlib.Path) -> dict[str, int]:
    for path in (folder, *folder.relative_to(directory).parents):
        if (directory / path).is_symlink() and path != pathlib.Path("."):
            raise errors.UnsafeError(f"{directory / path}: is a link; links are not followed.")
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except (FileNotFoundError, NotADirectoryError):
        raise errors.DamagedError(f"{folder}: the array is missing.") from None
    for entry in entries:
        if entry.is_symlink():
            raise errors.UnsafeError(f"{entry.path}: is a link; links are not followed.")
    try:
        return {entry.name: files.size(entry.path) for entry in entries}
    except PermissionError:
        raise  # This is no damage.
    except OSError as error:
        raise errors.DamagedError(f"{error.filename}: {error.strerror}.") from None


def _check_zarray(folder: pathlib.Path, spec: Spec, sizes: dict[str, int]) -> None:
    path = folder / ".zarray"
    if ".zarray" not in sizes:
        raise errors.DamagedError(f"{path}: is missing.")
    try:
        stored = files.read_json(path, max_bytes=_MAX_ZARRAY_BYTES)
        shape, chunks = tuple(stored["shape"]), tuple(stored["chunks"])
        compressor = stored["compressor"] and stored["compressor"]["id"]
        separator = stored.get("dimension_separator", ".")
        dtype = _parse_dtype(stored["dtype"], str(path))
    except PermissionError:
        raise  # This is no damage.
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise errors.DamagedError(f"{path}: is unreadable: {error!r}.") from error
    if shape != spec.shape or dtype.name != spec.dtype:
        raise errors.DamagedError(
            f"{path}: is {messages.array_text(dtype.name, shape)}, but the checkpoint says "
            f"{messages.array_text(spec.dtype, spec.shape)}."
        )
    if compressor not in (None, "gzip", "zlib", "zstd") or stored.get("filters"):
        raise errors.DamagedError(f"{path}: compressor {compressor!r} is not supported.")
    is_grid = len(chunks) == len(shape) and all(type(n) is int and n > 0 for n in chunks)
    if not is_grid or separator != ".":
        raise errors.DamagedError(f"{path}: has the chunks {chunks} for the shape {shape}.")
    _check_chunks(folder, spec, chunks, sizes)


def _check_chunks(
    folder: pathlib.Path, spec: Spec, chunks: tuple[int, ...], sizes: dict[str, int]
) -> None:
    n_chunks = math.prod(-(-n // c) for n, c in zip(spec.shape, chunks, strict=True))
    n_files = len(sizes) - 1
    if n_chunks > n_files:
        raise errors.DamagedError(
            f"{folder}: {n_chunks - n_files} of {n_chunks} chunk files are missing."
        )
    n_bytes = n_chunks * math.prod(chunks) * leaves.to_dtype(spec.dtype).itemsize
    if n_bytes > _MAX_RATIO * sum(sizes.values()):
        raise errors.UnsafeError(
            f"{folder}: claims {n_bytes} bytes of values in files of {sum(sizes.values())} bytes, "
            "which is impossible."
        )


def _parse_dtype(name: Any, where: str) -> np.dtype:
    """Parses numpy's short form ('<f4') or a name ('float32', 'bfloat16')."""
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        name = np.dtype(name).name if isinstance(name, str) and name[:1] in "<|" else name
    return leaves.to_dtype(name, where)
