import numpy as np
import pytest

from tekoa.data.arrays import ArrayReader
from tekoa.data.reader import DataError, Draw


def test_rows_are_those_of_numpy():
    x = np.random.default_rng(0).random((50, 3, 2))
    rows = np.array([4, 4, 49, 0])
    batch = ArrayReader({"x": x, "y": np.arange(50)}, "test").gather(Draw.of_rows(rows))
    np.testing.assert_array_equal(batch["x"], x[rows])
    np.testing.assert_array_equal(batch["y"], rows)


def test_classes_and_range_are_known_of_images():
    arrays = {"image": np.zeros((4, 2, 2, 1), np.uint8), "label": np.array([0, 3, 1, 1])}
    info = ArrayReader(arrays, "test").info
    assert info.n_classes == 4
    assert info.value_range == (0, 255)


@pytest.mark.parametrize("label", [np.array([0.5, 1.0]), np.array([-1, 1]), np.zeros((2, 3), int)])
def test_classes_are_not_guessed(label):
    assert ArrayReader({"label": label}, "test").info.n_classes is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "holds no array"),
        ({"x": np.float32(1)}, "have no axis of examples"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "different numbers of examples"),
        ({"x": np.zeros((0, 3))}, "holds no example"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, message):
    with pytest.raises(DataError, match=message):
        ArrayReader(arrays, "test")


def test_the_name_changes_with_the_data():
    names = {
        ArrayReader({"x": np.zeros(shape, dtype)}, "test").name
        for shape in (3, 4, (3, 2))
        for dtype in (np.float32, np.int32)
    }
    assert len(names) == 6
