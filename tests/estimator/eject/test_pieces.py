"""The order of rows in plain code is the order of the data."""

import functools
import math

import numpy as np
import pytest

from tekoa.data.batching import permutation
from tekoa.estimator.eject import pieces


@pytest.mark.parametrize(
    ("piece", "n"),
    [
        (pieces.SHORT_PERMUTATION, 10),
        (pieces.SHORT_PERMUTATION, 4096),
        (pieces.LONG_PERMUTATION, 5001),
    ],
)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**31 - 1, 3)])
def test_order_is_that_of_the_data(piece, n, seed, epoch):
    names = {"np": np, "math": math, "functools": functools, "SEED": seed}
    exec(pieces.HASHES + piece, names)
    expected = permutation.permute(np.arange(n), n, (seed, epoch, 0))
    np.testing.assert_array_equal(names["order_of"](epoch, n), expected)
