import math

import numpy as np
import pytest

from tekoa import data
from tekoa.estimator.run.passes import MarkFirst, Reiterable


def numbers(n=8):
    return data.as_source([{"x": i} for i in range(n)])


def test_each_pass_reads_the_data_from_its_start():
    passes = Reiterable(lambda: [1, 2])
    assert list(passes) == list(passes) == [1, 2]


def test_first_batches_of_groups_are_marked_after_a_restore():
    batches = MarkFirst(numbers().batches(2, consecutive=2), 2)
    assert [next(batches)["is_first"].tolist() for _ in range(2)] == [[True] * 2, [False] * 2]
    restored = MarkFirst(numbers().batches(2, consecutive=2), 2)
    restored.restore(batches.state())
    expected = next(batches)
    for name, field in next(restored).items():
        np.testing.assert_array_equal(field, expected[name])


def test_seek_moves_to_a_batch_and_its_mark():
    expected = list(MarkFirst(numbers().batches(2, epochs=1, consecutive=2), 2))
    batches = MarkFirst(numbers().batches(2, epochs=1, consecutive=2), 2)
    for i in (3, 0, 2):
        batches.seek(i)
        batch = next(batches)
        assert batch["x"].tolist() == expected[i]["x"].tolist()
        assert batch["is_first"].tolist() == expected[i]["is_first"].tolist()


def test_with_infinite_groups_only_the_first_batch_is_marked():
    batches = MarkFirst(numbers(4).batches(2, epochs=1), math.inf)
    assert [bool(batch["is_first"][0]) for batch in batches] == [True, False]


def test_batch_size_can_change_only_if_changes_are_allowed():
    batches = MarkFirst(numbers().batches(2), 0)
    next(batches), next(batches)
    with pytest.raises(data.ChangedDataError, match="batch_size"):
        MarkFirst(numbers().batches(4), 0).restore(batches.state())
    other = MarkFirst(numbers().batches(4), 0, allow_changes=True)
    other.restore(batches.state())
    assert next(other)["x"].tolist() == [4, 5, 6, 7]
