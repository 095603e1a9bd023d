"""Compares trees of arrays bit by bit."""

import jax
import numpy as np

from tekoa.core import trees


def assert_trees_equal(a: trees.PyTree, b: trees.PyTree) -> None:
    """Raises unless two trees have the same structure, dtypes, shapes and bits.

    A NaN equals a NaN of the same bits; 0.0 does not equal -0.0.

    Raises:
        AssertionError: Names the leaf, the index and both values of the first difference.

    >>> assert_trees_equal({'w': np.zeros(2)}, {'w': np.zeros(2)})
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise AssertionError(
            f"The trees differ in structure: {jax.tree.structure(a)} and {jax.tree.structure(b)}."
        )
    leaves = zip(trees.leaf_names(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    for name, x, y in leaves:
        _assert_leaves_equal("/".join(name), trees.to_numpy(x), trees.to_numpy(y))


def _assert_leaves_equal(name: str, x: np.ndarray, y: np.ndarray) -> None:
    if x.dtype != y.dtype or x.shape != y.shape:
        raise AssertionError(
            f"Leaf {name!r} differs in type: {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
        )
    differs = _bits(x) != _bits(y)
    if not differs.any():
        return
    flat_index = int(np.argmax(differs))
    index = tuple(int(i) for i in np.unravel_index(flat_index, x.shape))
    raise AssertionError(
        f"Leaf {name!r} differs at index {index}: {x[index]!r} and {y[index]!r}; "
        f"{int(differs.sum())} of {x.size} entries differ."
    )


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of each entry as one value, so that any bit makes a difference."""
    if x.dtype == object:
        return np.ravel(x)
    width = np.dtype((np.void, x.dtype.itemsize))
    return np.ascontiguousarray(x).reshape(-1).view(width)
