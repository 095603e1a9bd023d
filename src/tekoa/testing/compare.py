"""Compares trees of arrays bit by bit."""

from tekoa.core import trees
from tekoa.store.read import compare


def assert_trees_equal(a: trees.PyTree, b: trees.PyTree) -> None:
    """Raises unless two trees have the same structure, dtypes, shapes and bits.

    A NaN equals a NaN of the same bits; 0.0 does not equal -0.0.

    Raises:
        AssertionError: Names the leaf, the index and both values of the first difference.

    >>> import numpy as np
    >>> assert_trees_equal({'w': np.zeros(2)}, {'w': np.zeros(2)})
    """
    difference = compare.first_difference(a, b)
    if difference is not None:
        raise AssertionError(f"{difference.text}.")
