"""Reads the arrays of a step, leaf by leaf.

They are stored in the step's `default/` folder as one PyTree of nested dicts in Orbax's format,
so that plain Orbax reads them as the step's default item. They are not compressed: trained
weights hardly shrink, and files smaller than the arrays in memory can be rejected as damaged.
`arrays_write` writes them.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tekoa.core import messages, trees
from tekoa.store import errors
from tekoa.store.commit import fault_points, paths
from tekoa.store.formats.leaves import Leaf, Shardings, to_dtype

FOLDER = "default"

# Dtypes that zarr can store; others (int4, float8 ...) are stored as their bytes.
_NATIVE = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


def to_stored(value: Any) -> Any:
    """Converts an array to what zarr can store: one device as numpy, odd dtypes as bytes."""
    is_odd = value.dtype.name not in _NATIVE
    if isinstance(value, jax.Array) and (
        is_odd or (value.is_fully_addressable and value.is_fully_replicated)
    ):
        value = np.asarray(value)
    return value.view(np.uint8) if is_odd else value


def spec(folder: pathlib.Path, name: trees.Name) -> dict[str, Any]:
    """Returns the TensorStore spec of an array in a folder of arrays."""
    return {
        "driver": "zarr",
        "kvstore": {**kvstore(folder), "path": f"{'.'.join(map(paths.escape, name))}/"},
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def kvstore(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the TensorStore spec of the key-value store with all arrays of a folder."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}


def read(
    directory: pathlib.Path, leaves: Mapping[trees.Name, Leaf], shardings: Shardings
) -> dict[trees.Name, Any]:
    """Reads leaves of a step.

    Args:
        directory: The step.
        leaves: The leaves to read, as described by the index.
        shardings: Shardings of the leaves to spread over devices, which are read shard by
            shard; the others become numpy arrays.

    Raises:
        errors.DamagedError: If an array is missing or does not match its description. Nothing
            is allocated for it.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    nonempty = {name: leaf for name, leaf in leaves.items() if 0 not in leaf.shape}
    _check_sizes(directory, nonempty)
    opening = {name: ts.open(spec(directory / FOLDER, name), context=context) for name in nonempty}
    stores = {name: _check(directory, nonempty[name], future) for name, future in opening.items()}
    fault_points.reach("mid_read")
    # All reads start before any is awaited, so that TensorStore runs them in parallel.
    reading = {
        name: start_read(store, nonempty[name], shardings.get(name), _where(directory, name))
        for name, store in stores.items()
    }
    return {
        name: reading[name]() if name in reading else np.zeros(leaf.shape, to_dtype(leaf.dtype))
        for name, leaf in leaves.items()
    }


def start_read(
    store: Any, leaf: Leaf, sharding: jax.sharding.Sharding | None, where: str
) -> Callable[[], Any]:
    """Starts reading an array: shard by shard if there is a sharding, else all of it.

    Args:
        store: The opened TensorStore.
        leaf: The description of the array.
        sharding: The sharding of the result; None for a numpy array.
        where: Names the array in messages.

    Returns:
        A function that waits for the array and returns it, or raises `errors.DamagedError`.
    """
    indices = (
        [()] if sharding is None else sharding.addressable_devices_indices_map(leaf.shape).values()
    )
    # Replicas of a shard are read once.
    futures = {key: store[index].read() for key, index in {str(i): i for i in indices}.items()}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        value = finish(futures[str(index)], where)
        return value if leaf.dtype in _NATIVE else value.view(to_dtype(leaf.dtype))

    if sharding is None:
        return lambda: shard(())
    return lambda: jax.make_array_from_callback(leaf.shape, sharding, shard)


def _check_sizes(directory: pathlib.Path, leaves: Mapping[trees.Name, Leaf]) -> None:
    folder = directory / FOLDER
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = sum(leaf.n_bytes for leaf in leaves.values())
    if needed > on_disk:
        raise errors.DamagedError(
            f"{folder}: the index describes {needed} bytes of arrays, but the files have {on_disk}."
        )


def _check(directory: pathlib.Path, leaf: Leaf, future: Any) -> Any:
    store = finish(future, _where(directory, leaf.name))
    dtype = leaf.dtype if leaf.dtype in _NATIVE else "uint8"
    if tuple(store.shape) != leaf.shape or store.dtype.name != dtype:
        raise errors.DamagedError(
            f"{_where(directory, leaf.name)} is "
            f"{messages.array_text(store.dtype.name, store.shape)}, but the index says "
            f"{messages.array_text(dtype, leaf.shape)}."
        )
    return store


def finish(future: Any, where: str) -> Any:
    """Waits for TensorStore to open or read an array; raises a DamagedError if it fails."""
    try:
        return future.result()
    except (ValueError, OSError) as error:
        raise errors.DamagedError(f"{where} cannot be read: {error}") from error


def _where(directory: pathlib.Path, name: trees.Name) -> str:
    return f"{directory}: array {'/'.join(name)!r}"
