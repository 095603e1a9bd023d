import numpy as np
import pytest

from tekoa.data import reader


class Squares(reader.RandomAccess):
    name = "squares"
    info = reader.Info(name="squares")

    def __len__(self):
        return 5

    def gather(self, draw):
        return {"x": draw.rows**2}


def test_a_random_access_reader_needs_only_length_and_rows():
    squares = Squares()
    assert reader.length(squares) == 5
    assert squares.reach(3) == 3
    assert squares.reach(9) == 5
    assert squares.first() == {"x": np.array([0])}
    assert squares.anchor((0, 3)) is None


def test_a_reader_without_rows_cannot_be_made():
    class Nothing(reader.RandomAccess):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_shapes_are_read_off_a_batch():
    info = reader.describe("two", {"x": np.zeros((2, 3, 4), np.float32)}, n_classes=7)
    assert info.shapes == {"x": (3, 4)}
    assert info.dtypes == {"x": np.float32}
    assert info.n_classes == 7


def test_examples_that_are_no_dict_have_no_shapes():
    assert reader.describe("pairs", (np.zeros(2), np.zeros(2))).shapes == {}


def test_lists_of_text_are_arrays_of_objects():
    assert reader.as_array(["a", "bc"]).dtype == object
    assert reader.as_array([1, 2]).dtype == np.int64


@pytest.mark.parametrize("value", ["text", b"bytes", None])
def test_text_stays_an_object(value):
    array = reader.as_array(value)
    assert array.shape == ()
    assert array[()] == value
