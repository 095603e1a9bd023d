"""Writes a step's arrays with TensorStore, in Orbax's format.

Every process writes its own shards: a single process into `default/`, each of several
processes into its own subfolder, which `merge` then joins.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tekoa import hosts
from tekoa.core import messages, trees
from tekoa.store import errors
from tekoa.store.commit import durable, fault_points, paths
from tekoa.store.formats import arrays_read

_PROCESS_FOLDER = "ocdbt.process_"
# Up to this size values are copied once more, to end up in one file instead of several.
_SMALL_BYTES = 1 << 24
# A chunk is always read completely.
_MAX_CHUNK_BYTES = 1 << 28
# Orbax's number for the key of a dict.
_DICT_KEY = 2


def write(directory: pathlib.Path, values: Mapping[trees.Name, Any]) -> None:
    """Writes arrays into the temporary directory of a step; `merge` must follow.

    Args:
        directory: The step's temporary directory.
        values: numpy or jax arrays by name. Arrays on several devices are written shard by
            shard; every process writes its own shards.

    Raises:
        errors.StoreError: If the processes together do not write an array exactly once.
        OSError: If writing to disk fails.
    """
    import tensorstore as ts

    group = hosts.current()
    for name, value in values.items():
        check_sharding(name, value, group.count)
    for value in values.values():
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    stored = {name: arrays_read.to_stored(x) for name, x in values.items() if np.size(x)}
    if not stored:
        return
    folder = directory / arrays_read.FOLDER
    folder.mkdir(exist_ok=True)
    if group.is_writer:
        (folder / "_METADATA").write_text(json.dumps(_metadata(stored)))
    if group.count > 1:
        folder = folder / f"{_PROCESS_FOLDER}{group.index}"
    shards = {name: list(own_shards(x, group.is_writer)) for name, x in stored.items()}
    n_bytes = sum(data.nbytes for array_shards in shards.values() for _, data in array_shards)
    transaction = ts.Transaction() if n_bytes <= _SMALL_BYTES else None
    options = {"create": True, "context": _context(), "transaction": transaction}
    # All arrays are opened and written in parallel.
    opening = {
        name: ts.open(_new_spec(folder, name, stored[name]), **options)
        for name in stored
        if shards[name]
    }
    stores = {name: _finish(future, _what(name)) for name, future in opening.items()}
    writing = [
        (name, store[index].write(data, can_reference_source_data_indefinitely=True))
        for name, store in stores.items()
        for index, data in shards[name]
    ]
    for name, future in writing:
        _finish(future if transaction is None else future.copy, _what(name))
    if transaction is not None:
        _finish(transaction.commit_async(), _what(*stored))
    fault_points.reach("mid_write")


def merge(directory: pathlib.Path) -> None:
    """Joins the files of all processes into one array store; called on one process.

    Raises:
        OSError: If writing to disk fails.
    """
    import tensorstore as ts

    folder = directory / arrays_read.FOLDER
    process_folders = sorted(folder.glob(f"{_PROCESS_FOLDER}*"))
    if not process_folders:
        return
    context = _context()
    what = "the index of all arrays"
    merged, *process_stores = (
        _finish(ts.KvStore.open(arrays_read.kvstore(path), context=context), what)
        for path in (folder, *process_folders)
    )
    transaction = ts.Transaction(atomic=True)
    for store in process_stores:
        # Copies references only: the arrays stay where they are.
        _finish(store.experimental_copy_range_to(merged.with_transaction(transaction)), what)
    _finish(transaction.commit_async(), what)


def own_files(directory: pathlib.Path, index: int) -> list[str]:
    """Lists the files that only process `index` touches; empty if there is one process."""
    folder = directory / arrays_read.FOLDER / f"{_PROCESS_FOLDER}{index}"
    files = [path for path, is_dir in durable.walk(folder) if not is_dir] if folder.is_dir() else []
    return [f"{arrays_read.FOLDER}/{folder.name}/{path}" for path in files]


def check_sharding(name: trees.Name, value: Any, n_processes: int) -> None:
    """Raises a StoreError for an array that would be stored in part, or several times."""
    if not isinstance(value, jax.Array):
        return
    if n_processes == 1 and not value.is_fully_addressable:
        raise errors.StoreError(
            f"{_what(name)} is partly on devices of other processes, which this store does not "
            "know. Join the processes with `tekoa.hosts.join`."
        )
    if n_processes > 1 and value.is_fully_addressable and not value.is_fully_replicated:
        raise errors.StoreError(
            f"{_what(name)} is sharded over the devices of this process alone. Shard it over the "
            "devices of all processes, or replicate it."
        )


def _context() -> Any:
    import tensorstore as ts

    # The commit syncs all files; a cache would hold values that are never read.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})


def own_shards(value: Any, is_writer: bool) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields the shards of an array that this process writes: each shard is written once."""
    if not isinstance(value, jax.Array):
        if is_writer:
            yield (), value
        return
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


def _new_spec(folder: pathlib.Path, name: trees.Name, value: Any) -> dict[str, Any]:
    shape = tuple(value.shape)
    shard = value.sharding.shard_shape(shape) if isinstance(value, jax.Array) else shape
    chunk = _chunk(shard, _MAX_CHUNK_BYTES // value.dtype.itemsize)
    return {
        **arrays_read.spec(folder, name),
        "dtype": value.dtype.name,
        "metadata": {"shape": shape, "chunks": chunk, "compressor": None},
    }


def _chunk(shard: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Returns the shape of a shard's chunks, split along its first axes.

    Chunks are equal, so that none spans two shards, which two processes would write. An axis
    whose length has no divisor near the desired number, such as a prime, is not split.

    >>> _chunk((30, 8, 7), 100)
    (1, 8, 7)
    """
    chunk = list(shard)
    for axis, length in enumerate(shard):
        n_min = -(-math.prod(chunk) // max_size)
        divisors = (n for n in range(min(n_min, length), 8 * n_min) if length % n == 0)
        chunk[axis] = length // next(divisors, 1)
    return tuple(chunk)


def _metadata(stored: Mapping[trees.Name, Any]) -> dict[str, Any]:
    """Returns Orbax's metadata: the names of the arrays and their nesting."""

    def describe(keys: tuple[str, ...]) -> dict[str, Any]:
        return {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }

    escaped = [tuple(map(paths.escape, name)) for name in stored]
    return {
        "tree_metadata": {str(keys): describe(keys) for keys in escaped},
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _what(*names: trees.Name) -> str:
    return f"array {messages.some_of([repr('/'.join(name)) for name in names], limit=1)}"


def _finish(future: Any, what: str) -> Any:
    """Waits for TensorStore and raises an OSError if it failed."""
    try:
        return future.result()
    except ValueError as error:  # TensorStore's error for a full disk, too.
        raise OSError(f"{what} cannot be written: {error}") from error
