"""Compares trees of arrays bit by bit, and names the first difference."""

import dataclasses

import jax
import numpy as np

from tekoa.core import trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two trees.

    Attributes:
        name: The leaf, joined by slashes; empty if the trees differ in structure.
        text: What differs, as a sentence without an end.
        n_leaves: Number of leaves that differ.
    """

    name: str
    text: str
    n_leaves: int = 1

    def __str__(self) -> str:
        """Returns one sentence."""
        more = f" {self.n_leaves - 1} more arrays differ." if self.n_leaves > 1 else ""
        return f"{self.text}.{more}"


def first_difference(a: trees.PyTree, b: trees.PyTree) -> Difference | None:
    """Returns the first difference between two trees; None if all bits are the same.

    A NaN equals a NaN of the same bits; 0.0 does not equal -0.0.

    >>> print(first_difference({'w': np.zeros(2)}, {'w': np.array([0.0, 1.0])}))
    Leaf 'w' differs at index (1,): 0.0 and 1.0; 1 of 2 entries differ.
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        structures = f"{jax.tree.structure(a)} and {jax.tree.structure(b)}"
        return Difference(name="", text=f"The trees differ in structure: {structures}")
    leaves = zip(trees.leaf_names(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    texts = {
        "/".join(name): _leaf_difference("/".join(name), trees.to_numpy(x), trees.to_numpy(y))
        for name, x, y in leaves
    }
    differing = {name: text for name, text in texts.items() if text is not None}
    if not differing:
        return None
    name, text = next(iter(differing.items()))
    return Difference(name=name, text=text, n_leaves=len(differing))


def _leaf_difference(name: str, x: np.ndarray, y: np.ndarray) -> str | None:
    if x.dtype != y.dtype or x.shape != y.shape:
        return (
            f"Leaf {name!r} differs in type: {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
        )
    differs = _bits(x) != _bits(y)
    if not differs.any():
        return None
    flat_index = int(np.argmax(differs))
    index = tuple(int(i) for i in np.unravel_index(flat_index, x.shape))
    return (
        f"Leaf {name!r} differs at index {index}: {x[index]} and {y[index]}; "
        f"{int(differs.sum())} of {x.size} entries differ"
    )


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of each entry as one value, so that any bit makes a difference."""
    if x.dtype == object:
        return np.ravel(x)
    width = np.dtype((np.void, x.dtype.itemsize))
    return np.ascontiguousarray(x).reshape(-1).view(width)
