"""Tekoa's items in a step of the T5X format.

`model_params` is T5X's `target`, `optimizer_state` its `state/param_states`,
`model_state` its `flax_mutables`. What T5X has no place for (average, carry, rng ...)
stands in a second msgpack file, and the index beside it, so that a step that Tekoa
wrote in this format resumes exactly. T5X looks at neither file.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tekoa.core import trees
from tekoa.store import arrays, errors, leaves, names, t5x, t5x_msgpack, t5x_zarr

FILE = "tekoa_items"

_HOMES: dict[str, trees.Name] = {
    "model_params": ("target",),
    "optimizer_state": ("state", "param_states"),
    "model_state": ("flax_mutables",),
}


@dataclasses.dataclass(frozen=True)
class T5XStep:
    """A step in T5X's format, opened for reading.

    Attributes:
        path: Its directory.
        index: What it holds, under the item names of Tekoa.
        values: Arrays that were in a msgpack file, or specs of zarr arrays.
    """

    path: pathlib.Path
    index: leaves.Index
    values: Mapping[trees.Name, Any]

    def read(
        self,
        wanted: Mapping[trees.Name, leaves.Leaf],
        shardings: Mapping[trees.Name, jax.sharding.Sharding],
    ) -> dict[trees.Name, Any]:
        """Reads leaves as numpy arrays, or as jax arrays where a sharding is given."""
        missing = [name for name in wanted if name not in self.values]
        if missing:
            raise errors.DamagedError(f"{self.path}: {'/'.join(missing[0])!r} is not there.")
        reading = {
            name: self._start(spec, leaf, shardings.get(name))
            for name, leaf in wanted.items()
            if isinstance(spec := self.values[name], t5x_zarr.Spec)
        }
        return {
            name: reading[name].result() if name in reading else np.asarray(self.values[name])
            for name in wanted
        }

    def _start(
        self, spec: t5x_zarr.Spec, leaf: leaves.Leaf, sharding: jax.sharding.Sharding | None
    ) -> arrays.Reading:
        store = t5x_zarr.open_array(self.path, spec)
        return arrays.Reading(store, leaf, sharding, str(self.path / spec.path))


def write(
    directory: pathlib.Path,
    index: leaves.Index,
    values: Mapping[trees.Name, Any],
    axes: Mapping[str, Any],
) -> None:
    """Writes items into a step that is being made.

    Args:
        directory: The step's temporary directory.
        index: What the step holds.
        values: Arrays by name.
        axes: By item, a tree of axes as `t5x.write` takes it.
    """
    local = {name: np.asarray(value) for name, value in values.items()}
    flat = {_HOMES[n[0]] + n[1:]: value for n, value in local.items() if n[0] in _HOMES}
    state = arrays.nest({("state", "step"): np.asarray(index.step, np.int32), **flat})
    state.setdefault("target", {})
    if "optimizer_state" in index.items:
        state["state"].setdefault("param_states", {})
    placed = arrays.nest({home: axes[item] for item, home in _HOMES.items() if item in axes})
    t5x.write_tree(directory, state, placed)
    rest = {name: value for name, value in local.items() if name[0] not in _HOMES}
    (directory / FILE).write_bytes(t5x_msgpack.pack(arrays.nest(rest)))
    leaves.write_index(directory, index)


def open_step(path: pathlib.Path) -> T5XStep:
    """Opens a step of the T5X format, whoever wrote it.

    Raises:
        errors.DamagedError: If it is not whole, or asks for anything unsafe.
    """
    state = t5x.read_tree(path)
    found = {item: _child(state, home) for item, home in _HOMES.items()}
    items = [item for item, node in found.items() if node is not None]
    values: dict[trees.Name, Any] = {}
    for item in items:
        values.update(_flatten(found[item], (item,)))
    if (path / names.INDEX).exists():
        extra = t5x_msgpack.unpack((path / FILE).read_bytes(), str(path / FILE))
        return T5XStep(path, leaves.read_index(path), {**values, **_flatten(extra, ())})
    described = {name: _describe(name, value) for name, value in values.items()}
    index = leaves.Index(step=_step_of(path, state), leaves=described, items=items, meta={})
    return T5XStep(path, index, values)


def _child(node: Any, name: trees.Name) -> Any:
    for part in name:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _step_of(path: pathlib.Path, state: dict[str, Any]) -> int:
    """Gives the step that the tree tells, or else the directory's name."""
    told = _child(state, ("state", "step"))
    if told is None:
        told = names.parse_step(path.name)
    try:
        return int(told)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise errors.DamagedError(f"{path / names.T5X}: has no step.") from None


def _describe(name: trees.Name, value: Any) -> leaves.Leaf:
    if isinstance(value, t5x_zarr.Spec):
        return leaves.Leaf(name=name, shape=value.shape, dtype=value.dtype)
    array = np.asarray(value)
    return leaves.Leaf(name=name, shape=array.shape, dtype=array.dtype.name)


def _flatten(node: Any, name: trees.Name) -> dict[trees.Name, Any]:
    if isinstance(node, dict):
        flat: dict[trees.Name, Any] = {}
        for key, child in node.items():
            flat.update(_flatten(child, (*name, key)))
        return flat
    return {} if node is None or isinstance(node, str) else {name: node}
