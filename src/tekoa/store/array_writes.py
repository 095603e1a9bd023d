"""Writes a step's arrays with TensorStore, in the format of Orbax.

Every process writes the shards that it holds: one process into `default/` itself, each of
several into a folder of its own there, which `merge` then joins.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tekoa.core import hosts, trees
from tekoa.store import arrays, errors, faultpoints, files, names

_FOLDER_OF_PROCESS = "ocdbt.process_"
# As much may be copied, for one file instead of several.
_SMALL_BYTES = 1 << 24
# A chunk is read whole.
_MAX_CHUNK_BYTES = 1 << 28
# Orbax's number for a key of a dict.
_DICT_KEY = 2


def write(directory: pathlib.Path, values: Mapping[trees.Name, Any]) -> None:
    """Writes arrays into a step that is being made; `merge` must follow.

    Args:
        directory: The step's temporary directory.
        values: numpy or jax arrays by name. Arrays over several devices are written
            shard by shard; every process writes the shards it holds.

    Raises:
        errors.StoreError: If an array cannot be put together from what processes write.
        OSError: If the disk refuses.
    """
    import tensorstore as ts

    group = hosts.current()
    for name, value in values.items():
        _check_place(name, value, group.count)
    for value in values.values():
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    stored = {name: arrays.to_stored(x) for name, x in values.items() if np.size(x)}
    if not stored:
        return
    folder = directory / arrays.FOLDER
    folder.mkdir(exist_ok=True)
    if group.is_writer:
        (folder / "_METADATA").write_text(json.dumps(_metadata(stored)))
    if group.count > 1:
        folder = folder / f"{_FOLDER_OF_PROCESS}{group.index}"
    context = _context()
    parts = {name: list(_parts(x, group.is_writer)) for name, x in stored.items()}
    n_bytes = sum(part.nbytes for of_array in parts.values() for _, part in of_array)
    transaction = ts.Transaction() if n_bytes <= _SMALL_BYTES else None
    how = {"create": True, "context": context, "transaction": transaction}
    # All are opened and written side by side.
    opening = {
        name: ts.open(_new(folder, name, stored[name]), **how) for name in stored if parts[name]
    }
    opened = {name: _finish(future, _what(name)) for name, future in opening.items()}
    writing = [
        (name, store[index].write(part, can_reference_source_data_indefinitely=True))
        for name, store in opened.items()
        for index, part in parts[name]
    ]
    for name, future in writing:
        _finish(future if transaction is None else future.copy, _what(name))
    if transaction is not None:
        _finish(transaction.commit_async(), _what(*stored))
    faultpoints.reach("mid_write")


def merge(directory: pathlib.Path) -> None:
    """Joins what all processes have written into one; one of them calls it.

    Raises:
        OSError: If the disk refuses.
    """
    import tensorstore as ts

    folder = directory / arrays.FOLDER
    of_processes = sorted(folder.glob(f"{_FOLDER_OF_PROCESS}*"))
    if not of_processes:
        return
    context = _context()
    what = "the index of all arrays"
    whole, *parts = (
        _finish(ts.KvStore.open(arrays.kvstore(path), context=context), what)
        for path in (folder, *of_processes)
    )
    transaction = ts.Transaction(atomic=True)
    for part in parts:
        # Copies references: the arrays stay where they are.
        _finish(part.experimental_copy_range_to(whole.with_transaction(transaction)), what)
    _finish(transaction.commit_async(), what)


def own_files(directory: pathlib.Path, index: int) -> list[str]:
    """The files that process `index` of several wrote and nobody else touches."""
    folder = directory / arrays.FOLDER / f"{_FOLDER_OF_PROCESS}{index}"
    paths = [path for path, is_dir in files.walk(folder) if not is_dir] if folder.is_dir() else []
    return [f"{arrays.FOLDER}/{folder.name}/{path}" for path in paths]


def _check_place(name: trees.Name, value: Any, n_processes: int) -> None:
    """Refuses what would be stored in part, or by several processes one over the other.

    Raises:
        errors.StoreError: If so.
    """
    if not isinstance(value, jax.Array):
        return
    if n_processes == 1 and not value.is_fully_addressable:
        raise errors.StoreError(
            f"{_what(name)} lies in part on devices of other processes, which this store does not "
            "know of. Join the processes with `tekoa.core.hosts.join`."
        )
    if n_processes > 1 and value.is_fully_addressable and not value.is_fully_replicated:
        raise errors.StoreError(
            f"{_what(name)} is split over devices of this process alone. Split it over those of "
            "all processes, or give one whole array."
        )


def _context() -> Any:
    import tensorstore as ts

    # The commit syncs all files; a cache would only hold what is never read.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})


def _parts(value: Any, is_writer: bool) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields what this process writes of an array: each shard is written once."""
    if not isinstance(value, jax.Array):
        if is_writer:
            yield (), value
        return
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


def _new(folder: pathlib.Path, name: trees.Name, value: Any) -> dict[str, Any]:
    shape = tuple(value.shape)
    shard = value.sharding.shard_shape(shape) if isinstance(value, jax.Array) else shape
    chunk = _chunk(shard, _MAX_CHUNK_BYTES // value.dtype.itemsize)
    return {
        **arrays.spec(folder, name),
        "dtype": value.dtype.name,
        "metadata": {"shape": shape, "chunks": chunk, "compressor": None},
    }


def _chunk(shard: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Splits a shard along its first axes.

    Pieces are equal, so that no chunk reaches over two shards, which two processes would
    write. A length that has no divisor near what is wanted, such as a prime, stays whole.

    >>> _chunk((30, 8, 7), 100)
    (1, 8, 7)
    """
    chunk = list(shard)
    for axis, length in enumerate(shard):
        n_wanted = -(-math.prod(chunk) // max_size)
        fitting = (n for n in range(min(n_wanted, length), 8 * n_wanted) if length % n == 0)
        chunk[axis] = length // next(fitting, 1)
    return tuple(chunk)


def _metadata(stored: Mapping[trees.Name, Any]) -> dict[str, Any]:
    """What Orbax reads first: the names and how they are nested."""

    def described(keys: tuple[str, ...]) -> dict[str, Any]:
        return {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }

    escaped = [tuple(map(names.escape, name)) for name in stored]
    return {
        "tree_metadata": {str(keys): described(keys) for keys in escaped},
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _what(*of: trees.Name) -> str:
    return f"array {'/'.join(of[0])!r}" + (f" and {len(of) - 1} more" if of[1:] else "")


def _finish(future: Any, what: str) -> Any:
    """Waits for TensorStore.

    Raises:
        OSError: If it failed.
    """
    try:
        return future.result()
    except ValueError as error:  # So TensorStore tells of a full disk too.
        raise OSError(f"{what} cannot be written: {error}") from error
