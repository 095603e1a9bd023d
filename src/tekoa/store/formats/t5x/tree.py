"""The T5X checkpoint format, version 3, read and written without T5X.

A step is a directory with a msgpack file named `checkpoint` that contains the tree: small
arrays directly, and a spec for each array that is stored beside it as zarr. An array is stored
as zarr if and only if it has axes, or is split over several devices.
"""

import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from tekoa import hosts
from tekoa.core import files, trees
from tekoa.store import errors
from tekoa.store.commit import commit, manifest, paths
from tekoa.store.commit.lease import held
from tekoa.store.formats import arrays_read, checked, leaves
from tekoa.store.formats.t5x import msgpack, zarr

_VERSION = 3
_MAX_NAME_BYTES = 200
_LEAVES = (np.ndarray, np.generic, int, float, complex, str)


def read(path: str | os.PathLike[str], *, step: int | None = None) -> dict[str, Any]:
    """Reads a T5X checkpoint with T5X's own names.

    Args:
        path: A directory of steps, the directory of one step, or its msgpack file.
        step: The step to read from a directory of steps; by default the newest.

    Returns:
        Nested dicts of numpy arrays (bfloat16 from ml_dtypes), with the keys `target`,
        `state` and possibly `flax_mutables`.

    Raises:
        errors.UnsafeError: If it refers to anything outside its directory.
        errors.DamagedError: If it is incomplete or not in this format.
    """
    directory = find(path, step)
    if (directory / paths.MANIFEST).exists():
        manifest.check(directory, manifest.read(directory), "full")
    return resolve(directory, read_tree(directory))


def write(
    directory: str | os.PathLike[str], step: int, tree: trees.PyTree, *, axes: Any = None
) -> pathlib.Path:
    """Writes a T5X checkpoint, committed in the same way as native ones.

    Args:
        directory: The directory of steps.
        step: The step number; an existing step is not overwritten.
        tree: The state as T5X names it: `target`, `state` with `step` and `param_states`,
            `flax_mutables`. Nothing is cast.
        axes: A tree with the same names. Leaves without axes, or with None, are stored in the
            msgpack file, all others as zarr.

    Returns:
        The directory of the step.

    Raises:
        ValueError: If two leaves would share a directory, or a name is not allowed.
    """
    write_files = functools.partial(write_tree, state=to_state(tree), axes=axes)
    # One process writes alone, even in a program of several.
    with held(directory) as lease:
        return commit.commit(lease, step, write_files, format="t5x", group=hosts.Hosts())


def find(path: str | os.PathLike[str], step: int | None = None) -> pathlib.Path:
    """Returns the directory of the step that `read` would read."""
    path = files.local_path(path).absolute()
    if path.is_file() and path.name == paths.T5X:
        path = path.parent
    if checked.is_t5x(path):
        return path
    steps = [n for n in paths.list_steps(path) if checked.is_t5x(paths.step_dir(path, n))]
    if not steps or (step is not None and step not in steps):
        which = "" if step is None else f" of step {step}"
        raise errors.StoreError(
            f"{path}: contains no T5X checkpoint{which}. Steps in this format: {steps}."
        )
    return paths.step_dir(path, steps[-1] if step is None else step)


def read_tree(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the tree of a step; leaves that are zarr arrays become `zarr.Spec`s.

    Raises:
        errors.DamagedError: See `read`.
    """
    file = directory / paths.T5X
    body = msgpack.read(file)
    if not isinstance(body, dict) or not isinstance(body.get("optimizer"), dict):
        raise errors.DamagedError(f"{file}: is not a T5X checkpoint; it has no 'optimizer'.")
    version = body.get("version", 0)
    if not isinstance(version, int) or version < 2:
        raise errors.DamagedError(
            f"{file}: has version {version!r}; only 2 and later are supported."
        )
    return parse(body["optimizer"], (), file, set())


def parse(node: Any, name: trees.Name, file: pathlib.Path, directories: set[str]) -> Any:
    """Returns a node of a msgpack file with checked specs; `directories` are those used before."""
    where = f"{file}: leaf {'/'.join(name)!r}"
    if not isinstance(node, dict):
        if node is not None and not isinstance(node, _LEAVES):
            raise errors.DamagedError(f"{where}: is a {type(node).__name__}.")
        return node
    if not zarr.is_spec(node):
        if not all(isinstance(key, str) for key in node):
            raise errors.DamagedError(f"{where}: has keys that are not strings.")
        return {key: parse(child, (*name, key), file, directories) for key, child in node.items()}
    spec = zarr.parse_spec(node, where)
    if spec.path in directories:
        raise errors.UnsafeError(
            f"{where}: shares the directory {spec.path!r} with another leaf; one of them was "
            "overwritten when the checkpoint was written."
        )
    directories.add(spec.path)
    return spec


def resolve(directory: pathlib.Path, tree: Any) -> Any:
    """Reads all zarr arrays of a tree, in parallel."""

    def start(leaf: Any) -> Any:
        is_array = isinstance(leaf, zarr.Spec)
        return leaf, zarr.open_array(directory, leaf).read() if is_array else None

    def finish(started: tuple[Any, Any]) -> Any:
        leaf, future = started
        return leaf if future is None else arrays_read.finish(future, str(directory / leaf.path))

    return msgpack.map_dicts(finish, msgpack.map_dicts(start, tree))


def to_state(tree: trees.PyTree) -> Any:
    """Converts any tree to nested dicts with string keys and numpy leaves.

    Lists and tuples become dicts with the keys '0', '1' ..., NamedTuples dicts of their fields.
    Numbers become arrays, because T5X cannot load bare numbers.
    """
    if tree is None or isinstance(tree, str):
        return tree
    if isinstance(tree, int) and not isinstance(tree, bool):
        return np.asarray(tree, np.int32 if abs(tree) < 2**31 else np.int64)
    if isinstance(tree, bool | float | complex):
        return np.asarray(tree)
    children = leaves.children(tree)
    if children is not None:
        return {name: to_state(child) for name, child in children.items()}
    if hasattr(tree, "dtype"):
        described = leaves.describe((), tree)
        return None if described is None else np.asarray(described[1])
    flat = leaves.flatten({"": tree})
    if list(flat) == [("",)]:
        return to_state(flat["",])
    return to_state(trees.nest({name[1:]: leaf for name, leaf in flat.items()}))


def write_tree(
    directory: pathlib.Path,
    state: dict[str, Any],
    axes: Any = None,
    *,
    extra: dict[str, Any] | None = None,
    group: hosts.Hosts | None = None,
) -> Any:
    """Writes the files of a step into a directory; see `write`.

    All processes of the group call this. Each writes its shards of the arrays that are split
    over devices; process 0 writes the rest.

    Args:
        directory: The temporary directory of the step.
        state: Nested dicts of arrays.
        axes: See `write`.
        extra: More arrays, which are not part of T5X's tree.
        group: The processes; one by default.

    Returns:
        `extra`, with specs in place of the arrays that are stored as zarr.
    """
    is_writer = group is None or group.is_writer
    arrays: dict[str, tuple[dict[str, Any], Any]] = {}
    body = _replace_by_specs(state, axes, (), arrays)
    rest = _replace_by_specs(extra or {}, None, ("tekoa",), arrays)
    writing = [
        future
        for spec, array in arrays.values()
        for future in zarr.write(directory, spec, array, is_writer=is_writer)
    ]
    for future in writing:
        future.result()
    check_readable(directory / paths.T5X, body)
    if is_writer:
        data = msgpack.pack({"version": _VERSION, "optimizer": body})
        (directory / paths.T5X).write_bytes(data)
    return rest


def check_readable(file: pathlib.Path, body: dict[str, Any]) -> None:
    """Raises a ValueError if a tree, once written to a file, would be read as another one.

    Names have a meaning for msgpack, Flax and zarr specs, and not every dtype can be read back.
    Arrays are replaced by small ones, so that this is cheap.
    """

    def shrink(leaf: Any) -> Any:
        return np.zeros((1,) * leaf.ndim, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf

    def summary(node: Any, name: trees.Name) -> dict[trees.Name, Any]:
        if isinstance(node, zarr.Spec):
            return {name: (node.path, node.shape, node.dtype)}
        if zarr.is_spec(node) and isinstance(node["kvstore"], dict):
            shape, path = node["metadata"]["shape"], node["kvstore"]["path"]
            return {name: (path.removesuffix("/"), tuple(shape), node["dtype"])}
        if isinstance(node, dict):
            children = [summary(child, (*name, key)) for key, child in node.items()]
            return {k: v for child in children for k, v in child.items()} or {name: {}}
        return {name: (node.dtype.name, node.shape) if isinstance(node, np.ndarray) else node}

    small = msgpack.map_dicts(shrink, body)
    try:
        parsed = parse(msgpack.unpack(msgpack.pack(small), str(file)), (), file, set())
    except errors.DamagedError as error:
        raise ValueError(f"The tree cannot be stored in T5X's format: {error}") from error
    expected, read_back = summary(small, ()), summary(parsed, ())
    for name in expected:
        if expected[name] != read_back.get(name):
            raise ValueError(
                f"Leaf {'/'.join(name)!r} cannot be stored in T5X's format: it would be read as "
                f"{read_back.get(name, 'nothing')!r}. Rename it, or use format='native'."
            )


def _replace_by_specs(
    node: Any,
    axes: Any,
    name: trees.Name,
    arrays: dict[str, tuple[dict[str, Any], Any]],
) -> Any:
    """Replaces the arrays that are stored as zarr by their specs, and collects both."""
    if isinstance(node, dict):
        for key in node:
            if "/" in key or not paths.is_safe_path(key):
                raise ValueError(f"Key {key!r} of {'/'.join(name)!r} is not allowed in T5X.")
        child_axes = leaves.children(axes) or {}
        return {
            key: _replace_by_specs(child, child_axes.get(key), (*name, key), arrays)
            for key, child in node.items()
        }
    if not zarr.is_sharded(node):
        node = np.asarray(node) if isinstance(node, jax.Array) else node
        if axes is None or not isinstance(node, np.ndarray) or not node.size:
            return node
    path = ".".join(name)
    if path in arrays:
        raise ValueError(
            f"Leaf {'/'.join(name)!r} and another would both be stored in {path!r}. Rename one: "
            "T5X cannot distinguish 'a.b' from a/b."
        )
    if len(path.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"The name of leaf {'/'.join(name)!r} is too long for a directory.")
    arrays[path] = (zarr.make_spec(path, node), node)
    return arrays[path][0]
