import numpy as np
import pytest

from tekoa.data.readers import base


class Squares(base.RandomAccess):
    name = "squares"
    info = base.Info(name="squares")

    def __len__(self):
        return 5

    def gather(self, draw):
        return {"x": draw.rows**2}


def test_random_access_reader_needs_only_len_and_gather():
    squares = Squares()
    assert base.length(squares) == 5
    assert squares.reach(3) == 3
    assert squares.reach(9) == 5
    assert squares.first() == {"x": np.array([0])}
    assert squares.anchor((0, 3)) is None


def test_reader_without_gather_cannot_be_created():
    class Nothing(base.RandomAccess):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_describe_returns_shapes_of_a_batch():
    info = base.describe("two", {"x": np.zeros((2, 3, 4), np.float32)}, n_classes=7)
    assert info.shapes == {"x": (3, 4)}
    assert info.dtypes == {"x": np.float32}
    assert info.n_classes == 7


def test_examples_that_are_not_dicts_have_no_shapes():
    assert base.describe("pairs", (np.zeros(2), np.zeros(2))).shapes == {}


def test_lists_of_text_become_object_arrays():
    assert base.as_array(["a", "bc"]).dtype == object
    assert base.as_array([1, 2]).dtype == np.int64


@pytest.mark.parametrize("value", ["text", b"bytes", None])
def test_text_stays_an_object(value):
    array = base.as_array(value)
    assert array.shape == ()
    assert array[()] == value


def test_a_field_that_is_missing_is_named_with_those_there_are():
    info = base.describe("table.csv", {"width": np.zeros(2), "height": np.zeros(2)})
    with pytest.raises(
        base.DataError, match=r"table\.csv has no field 'image', only width, height"
    ):
        info.shapes["image"]
    assert "image" not in info.dtypes
    assert info.dtypes.get("image") is None
