import numpy as np
import pytest

from tekoa.data.batching import stacking
from tekoa.data.readers.base import DataError


def test_dicts_and_tuples_keep_their_structure():
    examples = [({"a": at, "b": (at, [0.5, at])}, at) for at in range(3)]
    batch = stacking.stack(examples, "test")
    assert isinstance(batch, tuple)
    assert batch[0]["a"].tolist() == batch[1].tolist() == [0, 1, 2]
    assert batch[0]["b"][1].tolist() == [[0.5, 0], [0.5, 1], [0.5, 2]]


def test_row_returns_the_stacked_example():
    examples = [{"x": np.arange(3) + at, "name": f"n{at}"} for at in range(4)]
    batch = stacking.stack(examples, "test")
    again = stacking.row(batch, 2)
    assert again["name"] == "n2"
    assert again["x"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"nested": rows}])
def test_rows_without_elements_are_split(wrap):
    batches = stacking.split(wrap({"x": np.zeros((6, 2, 0))}), 3)
    assert [stacking.map_arrays(np.shape, batch) for batch in batches] == [
        wrap({"x": (2, 2, 0)})
    ] * 3


def test_scalars_come_back_as_arrays():
    value = stacking.row({"x": np.arange(3)}, 1)["x"]
    assert isinstance(value, np.ndarray)
    assert value.shape == ()


def test_different_shapes_raise_with_the_field_name():
    with pytest.raises(DataError, match=r"Field 'a/b' of some data has shape \(2,\).*\(3,\)"):
        stacking.stack([{"a": {"b": np.zeros(2)}}, {"a": {"b": np.zeros(3)}}], "some data")


def test_different_fields_raise():
    with pytest.raises(DataError, match=r"\['x'\] and \['y'\]"):
        stacking.stack([{"x": 1}, {"y": 1}], "some data")
