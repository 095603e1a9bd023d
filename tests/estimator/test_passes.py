import math

import numpy as np
import pytest

from tekoa import data
from tekoa.estimator.passes import Again, WithFirst


def numbers(n=8):
    return data.as_source([{"x": i} for i in range(n)])


def test_data_is_read_from_its_start_at_every_pass():
    again = Again(lambda: [1, 2])
    assert list(again) == list(again) == [1, 2]


def test_first_batches_of_runs_are_marked_also_after_a_restore():
    batches = WithFirst(numbers().batches(2, consecutive=2), 2)
    assert [next(batches)["is_first"].tolist() for _ in range(2)] == [[True] * 2, [False] * 2]
    again = WithFirst(numbers().batches(2, consecutive=2), 2)
    again.restore(batches.state())
    expected = next(batches)
    for name, found in next(again).items():
        np.testing.assert_array_equal(found, expected[name])


def test_a_pass_is_one_run():
    batches = WithFirst(numbers(4).batches(2, epochs=1), math.inf)
    assert [bool(batch["is_first"][0]) for batch in batches] == [True, False]


def test_a_change_of_batch_size_is_allowed_on_request_only():
    batches = WithFirst(numbers().batches(2), 0)
    next(batches), next(batches)
    with pytest.raises(data.ChangedDataError, match="batch_size"):
        WithFirst(numbers().batches(4), 0).restore(batches.state())
    other = WithFirst(numbers().batches(4), 0, allow_changes=True)
    other.restore(batches.state())
    assert next(other)["x"].tolist() == [4, 5, 6, 7]
