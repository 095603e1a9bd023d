import numpy as np
import pytest

from tekoa import data
from tekoa.data.batching import ragged
from tekoa.data.readers.base import RowRequest

TEXTS = [{"tokens": [1, 2, 3]}, {"tokens": [4]}, {"tokens": [5, 6]}]


def test_lengths_are_read_or_known():
    reader = data.as_source(TEXTS).reader
    assert ragged.lengths_of(reader, "tokens").tolist() == [3, 1, 2]
    assert ragged.lengths_of(reader, "tokens", [7, 7, 7]).tolist() == [7, 7, 7]
    with pytest.raises(data.DataError, match="has 3 examples, but 2 lengths"):
        ragged.lengths_of(reader, "tokens", [1, 2])
    with pytest.raises(data.DataError, match="need a list or array 'x', but they have"):
        ragged.lengths_of(reader, "x")


def test_examples_are_read_one_by_one():
    reader = data.as_source(TEXTS).reader
    examples = ragged.read_examples(reader, RowRequest.of_rows([2, 0]))
    assert [one["tokens"].tolist() for one in examples] == [[[5, 6]], [[1, 2, 3]]]


def test_a_length_that_changes_is_refused():
    reader = data.as_source(TEXTS).reader
    one = {"tokens": np.zeros((1, 3)), "tags": np.zeros((1, 2))}
    with pytest.raises(data.DataError, match=r"'tags' .* has 2 elements, but 3 are expected"):
        ragged.fields_of(one, ("tokens", "tags"), 3, reader)
