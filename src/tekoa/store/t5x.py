"""The T5X checkpoint format, version 3, read and written without T5X.

A step is a directory with a msgpack file named `checkpoint` that holds the tree, its
small arrays inside and a spec in place of each array that is stored as zarr beside
it. Which is which is decided by axes alone: no axes, inside.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tekoa.core import trees
from tekoa.store import arrays, commit, errors, leaves, manifest, names, t5x_msgpack, t5x_zarr
from tekoa.store import lease as lease_lib

_VERSION = 3
_MAX_NAME_BYTES = 200
_LEAVES = (np.ndarray, np.generic, int, float, complex, str)


def read(path: str | os.PathLike[str], *, step: int | None = None) -> dict[str, Any]:
    """Reads a T5X checkpoint as it is.

    Args:
        path: A directory of steps, the directory of one step, or its msgpack file.
        step: This step of a directory of steps; None takes the newest.

    Returns:
        Nested dicts with `target`, `state` and maybe `flax_mutables`, of numpy arrays
        (bfloat16 as ml_dtypes').

    Raises:
        errors.UnsafeError: If it asks for anything outside its directory.
        errors.DamagedError: If it is not whole or not in this format.
    """
    directory = find(path, step)
    if (directory / names.MANIFEST).exists():
        manifest.check(directory, manifest.read(directory), "full")
    return resolve(directory, read_tree(directory))


def write(
    directory: str | os.PathLike[str], step: int, tree: trees.PyTree, *, axes: Any = None
) -> pathlib.Path:
    """Writes a T5X checkpoint, committed as Tekoa's own are.

    Args:
        directory: The directory of steps.
        step: The step; one that exists is not overwritten.
        tree: What T5X calls the state: `target`, `state` with `step` and
            `param_states`, `flax_mutables`. Nothing is cast.
        axes: A tree of the same names. A leaf whose axes are None, or not given, goes
            into the msgpack file, any other into zarr.

    Returns:
        The directory of the step.

    Raises:
        ValueError: If two names would share a directory, or one cannot be a name.
    """
    state = to_state(tree)
    with lease_lib.held(directory) as lease:
        return commit.commit(lease, step, lambda tmp: write_tree(tmp, state, axes), layout="t5x")


def is_t5x(path: pathlib.Path) -> bool:
    """Tells whether a directory is a step in this format.

    `checkpoint` may also be Orbax's file or TensorFlow's; those are not ours.
    """
    file = path / names.T5X
    if not file.is_file() or (path / "_METADATA").exists():
        return False
    with open(file, "rb") as opened:
        return opened.read(21) != b"model_checkpoint_path"


def find(path: str | os.PathLike[str], step: int | None = None) -> pathlib.Path:
    """Gives the directory of the step that `read` would read."""
    path = pathlib.Path(path).absolute()
    if path.is_file() and path.name == names.T5X:
        path = path.parent
    if is_t5x(path):
        return path
    steps = [n for n in names.list_steps(path) if is_t5x(names.step_dir(path, n))]
    if not steps or (step is not None and step not in steps):
        wanted = "no T5X checkpoint" if step is None else f"no T5X checkpoint of step {step}"
        raise errors.StoreError(f"{path}: {wanted} is there. Steps in this format: {steps}.")
    return names.step_dir(path, steps[-1] if step is None else step)


def read_tree(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the tree of a step; leaves that are zarr arrays become `t5x_zarr.Spec`s.

    Raises:
        errors.DamagedError: See `read`.
    """
    file = directory / names.T5X
    if file.is_symlink():
        raise errors.UnsafeError(f"{file}: is a link; links are not followed.")
    body = t5x_msgpack.unpack(file.read_bytes(), str(file))
    if not isinstance(body, dict) or not isinstance(body.get("optimizer"), dict):
        raise errors.DamagedError(f"{file}: is not a T5X checkpoint: it has no 'optimizer'.")
    version = body.get("version", 0)
    if not isinstance(version, int) or version < 2:
        raise errors.DamagedError(f"{file}: has version {version!r}; 2 and later can be read.")
    seen: set[str] = set()
    return _parse(body["optimizer"], (), file, seen)


def _parse(node: Any, name: trees.Name, file: pathlib.Path, seen: set[str]) -> Any:
    where = f"{file}: leaf {'/'.join(name)!r}"
    if not isinstance(node, dict):
        if node is not None and not isinstance(node, _LEAVES):
            raise errors.DamagedError(f"{where}: is a {type(node).__name__}.")
        return node
    if not t5x_zarr.is_spec(node):
        if not all(isinstance(key, str) for key in node):
            raise errors.DamagedError(f"{where}: has keys that are not strings.")
        return {key: _parse(child, (*name, key), file, seen) for key, child in node.items()}
    spec = t5x_zarr.parse_spec(node, where)
    if spec.path in seen:
        raise errors.UnsafeError(
            f"{where}: shares the directory {spec.path!r} with another leaf; one of them was "
            "overwritten when the checkpoint was written."
        )
    seen.add(spec.path)
    return spec


def resolve(directory: pathlib.Path, tree: Any) -> Any:
    """Reads every zarr array of a tree, side by side."""
    reading: dict[str, Any] = {}

    def start(node: Any) -> None:
        if isinstance(node, dict):
            for child in node.values():
                start(child)
        elif isinstance(node, t5x_zarr.Spec):
            reading[node.path] = t5x_zarr.open_array(directory, node).read()

    def finish(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: finish(child) for key, child in node.items()}
        if not isinstance(node, t5x_zarr.Spec):
            return node
        return arrays.finish(reading[node.path], str(directory / node.path))

    start(tree)
    return finish(tree)


def to_state(tree: trees.PyTree) -> Any:
    """Turns any tree into nested dicts with string keys and numpy leaves.

    Lists, tuples and NamedTuples become maps of '0', '1' ... or of their fields.
    Numbers become arrays, since the original cannot load bare ones.
    """
    if tree is None or isinstance(tree, str):
        return tree
    if isinstance(tree, int) and not isinstance(tree, bool):
        return np.asarray(tree, np.int32 if abs(tree) < 2**31 else np.int64)
    if isinstance(tree, bool | float | complex):
        return np.asarray(tree)
    fields = getattr(tree, "_fields", None)
    if isinstance(tree, Mapping):
        return {str(key): to_state(child) for key, child in tree.items()}
    if isinstance(tree, tuple) and fields is not None:
        return {field: to_state(child) for field, child in zip(fields, tree, strict=True)}
    if isinstance(tree, list | tuple):
        return {str(i): to_state(child) for i, child in enumerate(tree)}
    if hasattr(tree, "dtype"):
        described = leaves.describe((), tree)
        return None if described is None else np.asarray(described[1])
    flat = leaves.flatten({"": tree})
    if list(flat) == [("",)]:
        return to_state(flat["",])
    return to_state(arrays.nest({name[1:]: leaf for name, leaf in flat.items()}))


def write_tree(directory: pathlib.Path, state: dict[str, Any], axes: Any = None) -> None:
    """Writes the files of a step into a directory; see `write`."""
    found: dict[str, tuple[dict[str, Any], np.ndarray]] = {}
    body = _place(state, axes, (), found)
    writing = [t5x_zarr.write(directory, spec, array) for spec, array in found.values()]
    for future in writing:
        future.result()
    data = t5x_msgpack.pack({"version": _VERSION, "optimizer": body})
    (directory / names.T5X).write_bytes(data)


def _place(
    node: Any,
    axes: Any,
    name: trees.Name,
    found: dict[str, tuple[dict[str, Any], np.ndarray]],
) -> Any:
    """Puts specs where arrays go to zarr, and collects those."""
    if isinstance(node, dict):
        for key in node:
            if "/" in key or not names.is_safe_path(key):
                raise ValueError(f"Key {key!r} of {'/'.join(name)!r} cannot be a name in T5X.")
        return {
            key: _place(child, _child(axes, key), (*name, key), found)
            for key, child in node.items()
        }
    if axes is None or not isinstance(node, np.ndarray) or not node.size:
        return node
    path = ".".join(name)
    if path in found:
        raise ValueError(
            f"Leaf {'/'.join(name)!r} and another would both be stored in {path!r}. Rename one: "
            "T5X cannot tell 'a.b' from a/b."
        )
    if len(path.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"Leaf {'/'.join(name)!r} has too long a name for a directory.")
    found[path] = (t5x_zarr.make_spec(path, node), node)
    return found[path][0]


def _child(axes: Any, key: str) -> Any:
    if isinstance(axes, Mapping):
        return axes.get(key)
    if hasattr(axes, "_fields"):
        return getattr(axes, key, None)
    if isinstance(axes, list | tuple) and key.isdigit() and int(key) < len(axes):
        return axes[int(key)]
    return None
