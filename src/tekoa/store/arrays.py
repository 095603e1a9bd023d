"""Arrays on disk: how a step holds them, and how they are read, leaf by leaf.

They stand in `default/` of a step as one PyTree of nested dicts in Orbax's format, so that
plain Orbax reads it as a step's default item. They are not compressed: trained weights
hardly shrink, and a size on disk below the size in memory can then be refused as damage.
`array_writes` writes them.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tekoa.core import trees
from tekoa.store import errors, leaves, names

FOLDER = "default"

# What zarr stores as it is; other dtypes (int4, float8 ...) go as their bytes.
_NATIVE = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


def nest(flat: Mapping[trees.Name, Any], rename: Callable[[str], str] = str) -> dict[str, Any]:
    """Builds nested dicts from leaves by name.

    >>> nest({('a', 'b'): 1, ('a', 'c'): 2})
    {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        node = tree
        for part in name[:-1]:
            node = node.setdefault(rename(part), {})
        node[rename(name[-1])] = value
    return tree


def to_stored(value: Any) -> Any:
    """Gives what zarr can hold: an array on one device as numpy, odd dtypes as bytes."""
    odd = value.dtype.name not in _NATIVE
    if isinstance(value, jax.Array) and (
        odd or (value.is_fully_addressable and value.is_fully_replicated)
    ):
        value = np.asarray(value)
    return value.view(np.uint8) if odd else value


def spec(folder: pathlib.Path, name: trees.Name) -> dict[str, Any]:
    """Gives what TensorStore needs to open an array.

    Args:
        folder: The arrays of a step, or of one process in it.
        name: The array.
    """
    return {
        "driver": "zarr",
        "kvstore": {**kvstore(folder), "path": f"{'.'.join(map(names.escape, name))}/"},
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def kvstore(folder: pathlib.Path) -> dict[str, Any]:
    """Gives the same for all arrays of a folder together."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}


def from_stored(value: np.ndarray, dtype: str) -> np.ndarray:
    """Undoes `to_stored`."""
    return value if dtype in _NATIVE else value.view(leaves.to_dtype(dtype))


def read(
    directory: pathlib.Path,
    wanted: Mapping[trees.Name, leaves.Leaf],
    shardings: Mapping[trees.Name, jax.sharding.Sharding],
) -> dict[trees.Name, Any]:
    """Reads leaves of a step.

    Args:
        directory: The step.
        wanted: The leaves to read, as the index describes them.
        shardings: Where a leaf is to be spread over devices; the others become numpy.

    Returns:
        Arrays by name; those with a sharding are read shard by shard.

    Raises:
        errors.DamagedError: If an array is missing or not as described. Nothing is
            allocated for an array that is not as described.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    full = {name: leaf for name, leaf in wanted.items() if 0 not in leaf.shape}
    _check_sizes(directory, full)
    opening = {name: ts.open(spec(directory / FOLDER, name), context=context) for name in full}
    opened = {name: _check(directory, full[name], future) for name, future in opening.items()}
    # All reads start before any is waited for: TensorStore runs them side by side.
    reading = {
        name: Reading(store, full[name], shardings.get(name), _where(directory, name))
        for name, store in opened.items()
    }
    return {
        name: reading[name].result()
        if name in reading
        else np.zeros(leaf.shape, leaves.to_dtype(leaf.dtype))
        for name, leaf in wanted.items()
    }


class Reading:
    """An array that is being read: whole, or shard by shard onto devices.

    Args:
        store: The opened TensorStore.
        leaf: What it holds.
        sharding: Where it goes; None gives a numpy array.
        where: The array, for messages.
    """

    def __init__(
        self,
        store: Any,
        leaf: leaves.Leaf,
        sharding: jax.sharding.Sharding | None,
        where: str,
    ):
        self._leaf, self._sharding, self._where = leaf, sharding, where
        parts = [()]
        if sharding is not None:
            parts = sharding.addressable_devices_indices_map(leaf.shape).values()
        # Replicas of a shard are read once.
        self._futures = {
            str(part): store[part].read() for part in {str(p): p for p in parts}.values()
        }

    def result(self) -> Any:
        """Waits for the values.

        Raises:
            errors.DamagedError: If they cannot be read.
        """
        if self._sharding is None:
            return self._part(())
        return jax.make_array_from_callback(self._leaf.shape, self._sharding, self._part)

    def _part(self, part: tuple[slice, ...] | None) -> np.ndarray:
        return from_stored(finish(self._futures[str(part)], self._where), self._leaf.dtype)


def _check_sizes(directory: pathlib.Path, wanted: Mapping[trees.Name, leaves.Leaf]) -> None:
    folder = directory / FOLDER
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = sum(leaf.n_bytes for leaf in wanted.values())
    if needed > on_disk:
        raise errors.DamagedError(
            f"{folder}: the index describes {needed} bytes of arrays, the files hold {on_disk}."
        )


def _check(directory: pathlib.Path, leaf: leaves.Leaf, future: Any) -> Any:
    store = finish(future, _where(directory, leaf.name))
    dtype = leaf.dtype if leaf.dtype in _NATIVE else "uint8"
    if tuple(store.shape) != leaf.shape or store.dtype.name != dtype:
        raise errors.DamagedError(
            f"{_where(directory, leaf.name)} is {store.dtype.name}{list(store.shape)}, the index "
            f"says {dtype}{list(leaf.shape)}."
        )
    return store


def finish(future: Any, where: str) -> Any:
    """Waits for TensorStore; what it cannot open or read is damage.

    Args:
        future: What TensorStore returned.
        where: The array, for the message.

    Raises:
        errors.DamagedError: If it failed.
    """
    try:
        return future.result()
    except (ValueError, OSError) as error:
        raise errors.DamagedError(f"{where} cannot be read: {error}") from error


def _where(directory: pathlib.Path, name: trees.Name) -> str:
    return f"{directory}: array {'/'.join(name)!r}"
