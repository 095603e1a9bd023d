"""A batch is inputs for the model and targets for the loss; both have rows."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import trees
from tekoa.core.trees import PyTree


def split_batch(batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tells the inputs of a batch from its targets.

    A pair `(x, y)`, `((x, ...), (y, ...))` or `((x, ...), ())` is taken apart; a mapping
    is the one input and the one target, for models and losses that pick by name.

    Raises:
        TypeError: If the batch is anything else.

    >>> split_batch(('x', ('y', 'z')))
    (('x',), ('y', 'z'))
    """
    if isinstance(batch, Mapping):
        return (batch,), (batch,)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
        return _as_tuple(inputs), _as_tuple(targets)
    seen = f"a {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        seen += f" of {len(batch)} entries"
    raise TypeError(
        f"Data must yield pairs (inputs, targets), where each may be a tuple, or dicts; got {seen}."
    )


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def check_arrays(batch: Any) -> None:
    """Raises if a leaf of the batch is not an array or a number.

    Raises:
        TypeError: It names the leaf and what stands there.
    """
    for name, leaf in zip(trees.leaf_names(batch), jax.tree.leaves(batch), strict=True):
        kind = getattr(getattr(leaf, "dtype", None), "kind", None)
        if (
            kind in ("U", "S", "O")
            or (kind is None and not np.isscalar(leaf))
            or (isinstance(leaf, (str, bytes)))
        ):
            raise TypeError(
                f"Entry {'/'.join(name) or 'batch'!r} of the batch must be an array of numbers, "
                f"got {type(leaf).__name__} {str(leaf)[:40]!r}."
            )


def n_rows(batch: Any) -> int:
    """Counts the rows: the size of the first axis of the first array that has one.

    >>> n_rows((np.zeros((4, 2)), np.zeros(4)))
    4
    """
    return next((int(x.shape[0]) for x in jax.tree.leaves(batch) if jnp.ndim(x)), 1)


def microbatches(tree: PyTree, n: int) -> PyTree:
    """Splits the rows of every array into `n` parts along a new first axis.

    Rows are dealt out like cards, so that on a mesh every part has rows of every device.

    Raises:
        ValueError: If the rows do not divide by `n`.
    """

    def split(name: trees.Name, x: Any) -> jax.Array:
        if jnp.ndim(x) == 0 or x.shape[0] % n:
            raise ValueError(
                f"accumulate={n} needs rows that divide by it; {'/'.join(name)!r} has "
                f"shape {jnp.shape(x)}."
            )
        return jnp.swapaxes(jnp.reshape(x, (x.shape[0] // n, n, *x.shape[1:])), 0, 1)

    return trees.map_named(split, tree)


def undo_microbatches(tree: PyTree) -> PyTree:
    """Puts the rows of `microbatches` back in order."""
    return jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree
    )


def describe(batch: Any) -> str:
    """Names the shapes and dtypes of a batch in one line.

    >>> describe({'x': np.zeros((4, 2), np.float32)})
    'x float32[4,2]'
    """
    names = ["/".join(name) or "batch" for name in trees.leaf_names(batch)]
    shown = (
        f"{name} {np.result_type(leaf)}[{','.join(map(str, np.shape(leaf)))}]"
        for name, leaf in zip(names, jax.tree.leaves(batch), strict=True)
    )
    return ", ".join(shown)
