"""Trees as named leaves: which of them can be stored, and how each is described.

Trees are stored without their classes. Every leaf has a name (the item's name, then the parts
of `core.trees`), a shape, a dtype and a kind.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from tekoa.core import messages, trees
from tekoa.store import errors

Kind = Literal["array", "key", "python"]
Shardings = Mapping[trees.Name, jax.sharding.Sharding]

_PYTHON = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """Description of a stored leaf.

    Attributes:
        name: Starts with the item: ('model_params', 'dense', 'kernel').
        shape: Shape of the stored array; for a PRNG key, the shape of its key data.
        dtype: Name of a numpy or ml_dtypes dtype.
        kind: 'array', 'key' (a typed PRNG key) or 'python' (a Python number).
        detail: The key's implementation, or the name of the Python type.
    """

    name: trees.Name
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "array"
    detail: str = ""

    @property
    def n_bytes(self) -> int:
        """Size of the array in memory."""
        return int(np.prod(self.shape, dtype=object)) * to_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        text = messages.array_text(self.dtype, self.shape)
        return f"{text} (PRNG key, {self.detail})" if self.kind == "key" else text


def to_dtype(name: Any, where: str = "the index") -> np.dtype:
    """Returns the dtype with a name found in a checkpoint: numbers only, never objects.

    Args:
        name: Name of a numpy or ml_dtypes dtype.
        where: Where it was found, for the error.

    Raises:
        errors.DamagedError: If there is none.

    >>> to_dtype('bfloat16').itemsize
    2
    """
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses some names as Python.
        dtype = np.dtype(object)
    if dtype.name != name or dtype.kind not in "biufcV" or dtype.type is np.void:
        raise errors.DamagedError(f"{where}: {str(name)[:40]!r} is not a numeric dtype.")
    return dtype


def is_function(value: Any) -> bool:
    """Returns whether a leaf is a function, which belongs to the structure of a tree."""
    return callable(value) and not hasattr(value, "dtype")


def describe(name: trees.Name, value: Any) -> tuple[Leaf, Any] | None:
    """Describes a leaf and returns the array to store for it.

    Returns:
        The description and a numpy or jax array; None for a function, which is not stored but
        comes from the target when restoring.

    Raises:
        TypeError: If the leaf is not a number or an array of numbers.
    """
    if trees.is_key(value):
        data = jax.random.key_data(value)
        detail = str(jax.random.key_impl(value))
        return Leaf(name=name, shape=data.shape, dtype="uint32", kind="key", detail=detail), data
    if isinstance(value, jax.Array):
        return Leaf(name=name, shape=value.shape, dtype=value.dtype.name), value
    if is_function(value):
        return None
    array = np.asarray(value)
    is_odd = array.dtype.type in (np.void, np.longdouble, np.clongdouble)
    if is_odd or array.dtype.kind not in "biufcV":
        raise TypeError(
            f"Cannot store leaf {'/'.join(name)!r}: it is a {type(value).__name__} of dtype "
            f"{array.dtype}. Store numbers as arrays and everything else in `meta`."
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    leaf = Leaf(name=name, shape=array.shape, dtype=array.dtype.name)
    if type(value) in _PYTHON:
        leaf = dataclasses.replace(leaf, kind="python", detail=type(value).__name__)
    return leaf, array


def flatten(items: Mapping[str, trees.PyTree]) -> dict[trees.Name, Any]:
    """Maps each leaf's name, which starts with its item, to the leaf.

    Raises:
        ValueError: If two leaves have the same name, or a leaf has the name of a node.
    """
    named: dict[trees.Name, Any] = {}
    for item, tree in items.items():
        for parts, leaf in zip(trees.leaf_names(tree), jax.tree.leaves(tree), strict=True):
            name = (item, *parts)
            if name in named:
                raise ValueError(f"Two leaves are both named {'/'.join(name)!r}. Rename one.")
            named[name] = leaf
    check_nesting(named)
    return named


def check_nesting(named: Mapping[trees.Name, Any]) -> None:
    """Raises a ValueError if a leaf has the name of a node around another leaf."""
    for name in named:
        for n_parts in range(1, len(name)):
            if name[:n_parts] in named:
                raise ValueError(
                    f"{'/'.join(name[:n_parts])!r} is both a leaf and a node of "
                    f"{'/'.join(name)!r}. Rename one."
                )


def snapshot(items: Mapping[str, trees.PyTree]) -> Callable[[], dict[str, trees.PyTree]]:
    """Copies trees and returns a function that returns the copies, in any thread.

    Containers and numpy arrays may be changed afterwards. jax arrays are immutable and are not
    copied.
    """
    flat = {item: jax.tree.flatten(tree) for item, tree in items.items()}
    for values, _ in flat.values():
        for i, value in enumerate(values):
            if isinstance(value, np.ndarray):
                values[i] = value.copy()
    return lambda: {
        item: jax.tree.unflatten(structure, values) for item, (values, structure) in flat.items()
    }


def node_classes(items: Mapping[str, trees.PyTree]) -> dict[trees.Name, str]:
    """Returns the class name of every NamedTuple node, such as an optimizer state, by name.

    >>> import optax
    >>> node_classes({'optimizer_state': optax.adam(1.0).init({'w': np.zeros(2)})})
    {('optimizer_state', '0'): 'ScaleByAdamState', ('optimizer_state', '1'): 'EmptyState'}
    """
    return {
        name: type(node).__name__
        for item, tree in items.items()
        for name, node in _named_tuples((item,), tree)
    }


def _named_tuples(name: trees.Name, node: Any) -> Iterator[tuple[trees.Name, Any]]:
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        yield name, node
    for part, child in (children(node) or {}).items():
        yield from _named_tuples((*name, part), child)


def children(node: Any) -> dict[str, Any] | None:
    """Returns the children of a dict, list, tuple or NamedTuple by name, else None."""
    if isinstance(node, Mapping):
        return {str(key): child for key, child in node.items()}
    if isinstance(node, list | tuple):
        names = getattr(node, "_fields", map(str, range(len(node))))
        return dict(zip(names, node, strict=True))
    return None
