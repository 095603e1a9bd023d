"""What a step holds, leaf by leaf, and the file that says so.

Trees are stored without their classes: every leaf has a name (the item's name, then
`core.trees` parts), a shape, a dtype and a kind. Nodes that are NamedTuples, such as
optimizer states, leave their class name in `Index.nodes`, so that a changed optimizer
chain can be matched later.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np

from tekoa.core import trees
from tekoa.store import errors, names

Kind = Literal["array", "key", "python"]

_PYTHON = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One stored leaf.

    Attributes:
        name: Item first: ('model_params', 'dense', 'kernel').
        shape: Of the stored array; a key's shape is that of its key data.
        dtype: numpy's or ml_dtypes' name.
        kind: 'array', 'key' (a typed PRNG key) or 'python' (a Python number).
        detail: The key's implementation or the Python type's name.
    """

    name: trees.Name
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "array"
    detail: str = ""

    @property
    def n_bytes(self) -> int:
        """Bytes of the array in memory."""
        return int(np.prod(self.shape, dtype=object)) * to_dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """All that is known of a step without reading its arrays.

    Attributes:
        step: Completed optimizer steps.
        leaves: By name.
        items: Names of the items, those without leaves included.
        meta: The JSON values stored with the step.
        metrics: The numbers that retention compares.
        nodes: Class names of NamedTuple nodes, by node name; empty if not known.
    """

    step: int
    leaves: dict[trees.Name, Leaf]
    items: list[str]
    meta: dict[str, Any]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    nodes: dict[trees.Name, str] = dataclasses.field(default_factory=dict)


def to_dtype(name: str) -> np.dtype:
    """Gives the dtype of a name, ml_dtypes' included.

    >>> to_dtype('bfloat16').itemsize
    2
    """
    try:
        return np.dtype(jax.numpy.dtype(name))
    except TypeError:
        raise errors.DamagedError(f"No dtype is named {name!r}; the index is damaged.") from None


def is_key(value: Any) -> bool:
    """Tells whether a leaf, which may be abstract, is an array of typed PRNG keys."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def is_function(value: Any) -> bool:
    """Tells whether a leaf belongs to the structure rather than to the numbers."""
    return callable(value) and not hasattr(value, "dtype")


def describe(name: trees.Name, value: Any) -> tuple[Leaf, Any] | None:
    """Describes a leaf and gives the array to store for it.

    Returns:
        The description and a numpy or jax array, or None for a function: functions
        belong to the structure and come from the target at restore.

    Raises:
        TypeError: If the leaf is not a number or an array of numbers.
    """
    if is_key(value):
        data = jax.random.key_data(value)
        detail = str(jax.random.key_impl(value))
        return Leaf(name=name, shape=data.shape, dtype="uint32", kind="key", detail=detail), data
    if isinstance(value, jax.Array):
        return Leaf(name=name, shape=value.shape, dtype=value.dtype.name), value
    if is_function(value):
        return None
    kind = "python" if type(value) in _PYTHON else "array"
    array = np.asarray(value)
    odd = array.dtype.type in (np.void, np.longdouble, np.clongdouble)
    if odd or array.dtype.kind not in "biufcV":
        raise TypeError(
            f"Leaf {'/'.join(name)!r} is a {type(value).__name__} of dtype {array.dtype}, which "
            "cannot be stored. Store numbers as arrays and everything else in `meta`."
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    detail = type(value).__name__ if kind == "python" else ""
    return Leaf(name=name, shape=array.shape, dtype=array.dtype.name, kind=kind, detail=detail), (
        array
    )


def flatten(items: Mapping[str, trees.PyTree]) -> dict[trees.Name, Any]:
    """Maps each leaf's name, item first, to the leaf.

    Raises:
        ValueError: If two leaves share a name, or one is named as a node of another.
    """
    named: dict[trees.Name, Any] = {}
    for item, tree in items.items():
        for parts, leaf in zip(trees.leaf_names(tree), jax.tree.leaves(tree), strict=True):
            name = (item, *parts)
            if name in named:
                raise ValueError(f"Two leaves are both named {'/'.join(name)!r}. Rename one.")
            named[name] = leaf
    _check_nesting(named)
    return named


def _check_nesting(named: Mapping[trees.Name, Any]) -> None:
    for name in named:
        for n_parts in range(1, len(name)):
            if name[:n_parts] in named:
                raise ValueError(
                    f"{'/'.join(name[:n_parts])!r} is both a leaf and a node of "
                    f"{'/'.join(name)!r}. Rename one."
                )


def snapshot(items: Mapping[str, trees.PyTree]) -> Callable[[], dict[str, trees.PyTree]]:
    """Fixes trees as they are now; the result gives them back, in any thread.

    Containers may change afterwards and numpy arrays be written to; jax arrays are
    immutable and are not copied.
    """
    flat = {item: jax.tree.flatten(tree) for item, tree in items.items()}
    for values, _ in flat.values():
        for i, value in enumerate(values):
            if isinstance(value, np.ndarray):
                values[i] = value.copy()
    return lambda: {
        item: jax.tree.unflatten(shape, values) for item, (values, shape) in flat.items()
    }


def node_classes(items: Mapping[str, trees.PyTree]) -> dict[trees.Name, str]:
    """Gives the class name of every NamedTuple node, by the node's name.

    >>> import optax
    >>> node_classes({'optimizer_state': optax.adam(1.0).init({'w': np.zeros(2)})})
    {('optimizer_state', '0'): 'ScaleByAdamState', ('optimizer_state', '1'): 'EmptyState'}
    """
    found: dict[trees.Name, str] = {}
    for item, tree in items.items():
        for name, node in _nodes((item,), tree):
            found[name] = type(node).__name__
    return found


def _nodes(name: trees.Name, node: Any) -> Iterator[tuple[trees.Name, Any]]:
    fields = getattr(node, "_fields", None)
    if isinstance(node, tuple) and fields is not None:
        yield name, node
        children = zip(fields, node, strict=True)
    elif isinstance(node, Mapping):
        children = ((str(key), child) for key, child in node.items())
    elif isinstance(node, list | tuple):
        children = ((str(i), child) for i, child in enumerate(node))
    else:
        return
    for part, child in children:
        yield from _nodes((*name, part), child)


def write_index(directory: pathlib.Path, index: Index) -> None:
    """Writes the index of a step into its directory."""
    body = {
        "step": index.step,
        "items": index.items,
        "leaves": [
            [list(leaf.name), list(leaf.shape), leaf.dtype, leaf.kind, leaf.detail]
            for leaf in index.leaves.values()
        ],
        "nodes": [[list(name), kind] for name, kind in index.nodes.items()],
        "meta": index.meta,
        "metrics": index.metrics,
    }
    (directory / names.INDEX).write_text(json.dumps(body))


def read_index(directory: pathlib.Path) -> Index:
    """Reads the index of a step.

    Raises:
        errors.DamagedError: If it is not there or not readable.
    """
    path = directory / names.INDEX
    try:
        body = json.loads(path.read_text())
        leaves = [_parse_leaf(*fields) for fields in body["leaves"]]
        index = Index(
            step=body["step"],
            leaves={leaf.name: leaf for leaf in leaves},
            items=[str(item) for item in body["items"]],
            meta=dict(body["meta"]),
            metrics={str(name): float(value) for name, value in body["metrics"].items()},
            nodes={tuple(map(str, name)): str(kind) for name, kind in body["nodes"]},
        )
        if type(index.step) is not int or index.step < 0:
            raise ValueError(f"step {index.step!r}")
        _check_nesting(index.leaves)
        return index
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise errors.DamagedError(f"{path}: the index is not readable: {error!r}.") from error


def _parse_leaf(name: Any, shape: Any, dtype: Any, kind: Any, detail: Any) -> Leaf:
    is_name = isinstance(name, list) and name and all(isinstance(part, str) for part in name)
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    is_kind = kind in ("array", "key", "python") and isinstance(detail, str)
    if not (is_name and is_shape and is_kind and isinstance(dtype, str)):
        raise ValueError(f"leaf {name!r}")
    to_dtype(dtype)
    return Leaf(name=tuple(name), shape=tuple(shape), dtype=dtype, kind=kind, detail=detail)
