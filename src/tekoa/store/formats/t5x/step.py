"""Tekoa's items in a step of the T5X format.

`model_params` is T5X's `target`, `optimizer_state` its `state/param_states`, `model_state` its
`flax_mutables`. Items unknown to T5X (average, carry, rng ...) are stored in a second msgpack
file with the index beside it, so that a step that Tekoa wrote in this format resumes exactly.
T5X reads neither file.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tekoa import hosts
from tekoa.core import trees
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.formats import arrays_read, arrays_write
from tekoa.store.formats.index import Index, Read, read_index, write_index
from tekoa.store.formats.leaves import Leaf, Shardings
from tekoa.store.formats.t5x import msgpack, tree, zarr

FILE = "tekoa_items"

# Where T5X stores our items.
_PLACES: dict[str, trees.Name] = {
    "model_params": ("target",),
    "optimizer_state": ("state", "param_states"),
    "model_state": ("flax_mutables",),
}


def write(
    directory: pathlib.Path,
    index: Index,
    values: Mapping[trees.Name, Any],
    axes: Mapping[str, Any],
) -> None:
    """Writes items into the temporary directory of a step; see `formats.step.write_step`."""
    group = hosts.current()
    for name, value in values.items():
        arrays_write.check_sharding(name, value, group.count)
    flat = {_PLACES[n[0]] + n[1:]: value for n, value in values.items() if n[0] in _PLACES}
    state = trees.nest({("state", "step"): np.asarray(index.step, np.int32), **flat})
    state.setdefault("target", {})
    if "optimizer_state" in index.items:
        state["state"].setdefault("param_states", {})
    state_axes = trees.nest({place: axes[item] for item, place in _PLACES.items() if item in axes})
    extra = trees.nest({name: value for name, value in values.items() if name[0] not in _PLACES})
    extra = tree.write_tree(directory, state, state_axes, extra=extra, group=group)
    tree.check_readable(directory / FILE, extra)
    if group.is_writer:
        (directory / FILE).write_bytes(msgpack.pack(extra))
        write_index(directory, index)


def open_step(path: pathlib.Path) -> tuple[Index, Read]:
    """Opens a step in the T5X format, whichever program wrote it; see `OpenStep`.

    Raises:
        errors.DamagedError: If it is incomplete or unsafe.
    """
    state = tree.read_tree(path)
    nodes = {item: _child(state, place) for item, place in _PLACES.items()}
    items = [item for item, node in nodes.items() if node is not None]
    values = _flatten({item: nodes[item] for item in items}, ())
    if (path / paths.INDEX).exists():
        extra = tree.parse(msgpack.read(path / FILE), (), path / FILE, set())
        index, values = read_index(path), {**values, **_flatten(extra, ())}
    else:
        leaves = {name: _describe(name, value) for name, value in values.items()}
        index = Index(step=_read_step(path, state), leaves=leaves, items=items, meta={})
    return index, functools.partial(_read, path, values)


def check_complete(path: pathlib.Path) -> None:
    """Checks that every array of a step is there; for a step without a manifest.

    Raises:
        errors.DamagedError: If a file is missing, or does not match the msgpack file.
    """
    for value in _flatten(tree.read_tree(path), ()).values():
        if isinstance(value, zarr.Spec):
            zarr.check_array(path, value)


def _read(
    path: pathlib.Path,
    values: Mapping[trees.Name, Any],
    leaves: Mapping[trees.Name, Leaf],
    shardings: Shardings,
) -> dict[trees.Name, Any]:
    """Reads leaves; `values` are arrays from a msgpack file, and specs of zarr arrays."""
    missing = [name for name in leaves if name not in values]
    if missing:
        raise errors.DamagedError(f"{path}: {'/'.join(missing[0])!r} is missing.")
    reading = {
        name: arrays_read.start_read(
            zarr.open_array(path, spec), leaf, shardings.get(name), str(path / spec.path)
        )
        for name, leaf in leaves.items()
        if isinstance(spec := values[name], zarr.Spec)
    }
    return {
        name: reading[name]() if name in reading else np.asarray(values[name]) for name in leaves
    }


def _child(node: Any, name: trees.Name) -> Any:
    for part in name:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _read_step(path: pathlib.Path, state: dict[str, Any]) -> int:
    """Returns the step number in the tree, or else in the directory's name."""
    step = _child(state, ("state", "step"))
    if step is None:
        step = paths.parse_step(path.name)
    try:
        return int(step)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        raise errors.DamagedError(f"{path / paths.T5X}: has no step number.") from None


def _describe(name: trees.Name, value: Any) -> Leaf:
    if isinstance(value, zarr.Spec):
        return Leaf(name=name, shape=value.shape, dtype=value.dtype)
    array = np.asarray(value)
    return Leaf(name=name, shape=array.shape, dtype=array.dtype.name)


def _flatten(node: Any, name: trees.Name) -> dict[trees.Name, Any]:
    if isinstance(node, dict):
        flat: dict[trees.Name, Any] = {}
        for key, child in node.items():
            flat.update(_flatten(child, (*name, key)))
        return flat
    return {} if node is None or isinstance(node, str) else {name: node}
