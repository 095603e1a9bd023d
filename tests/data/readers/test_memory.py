import numpy as np
import pytest

from tekoa import data
from tekoa.data.readers.base import DataError, RowRequest
from tekoa.data.readers.memory import ArrayReader, SequenceReader


def test_rows_match_numpy_indexing():
    x = np.random.default_rng(0).random((50, 3, 2))
    rows = np.array([4, 4, 49, 0])
    batch = ArrayReader({"x": x, "y": np.arange(50)}, "test").gather(RowRequest.of_rows(rows))
    np.testing.assert_array_equal(batch["x"], x[rows])
    np.testing.assert_array_equal(batch["y"], rows)


def test_classes_and_value_range_of_images_are_inferred():
    arrays = {"image": np.zeros((4, 2, 2, 1), np.uint8), "label": np.array([0, 3, 1, 1])}
    info = ArrayReader(arrays, "test").info
    assert info.n_classes == 4
    assert info.value_range == (0, 255)


@pytest.mark.parametrize("label", [np.array([0.5, 1.0]), np.array([-1, 1]), np.zeros((2, 3), int)])
def test_classes_of_unsuitable_labels_are_unknown(label):
    assert ArrayReader({"label": label}, "test").info.n_classes is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "contains no arrays"),
        ({"x": np.float32(1)}, "without an axis of examples"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "different numbers of examples"),
        ({"x": np.zeros((0, 3))}, "contains no examples"),
    ],
)
def test_unsuitable_arrays_raise(arrays, message):
    with pytest.raises(DataError, match=message):
        ArrayReader(arrays, "test")


def test_the_name_changes_with_the_data():
    names = {
        ArrayReader({"x": np.zeros(shape, dtype)}, "test").name
        for shape in (3, 4, (3, 2))
        for dtype in (np.float32, np.int32)
    }
    assert len(names) == 6


def test_elements_are_decoded():
    reader = SequenceReader(["a b", "c d"], "words", lambda text: {"words": text.split()})
    assert reader.gather(RowRequest.of_rows([1]))["words"].tolist() == [["c", "d"]]


def test_elements_are_read_in_one_call_if_possible():
    class Together(list):
        calls = []

        def __getitems__(self, rows):
            self.calls.append(list(rows))
            return [self[row] for row in rows]

    sequence = Together({"x": at} for at in range(8))
    assert next(data.as_source(sequence).batches(4))["x"].tolist() == [0, 1, 2, 3]
    assert [0, 1, 2, 3] in sequence.calls


def test_empty_sequence_raises():
    with pytest.raises(DataError, match="list contains no examples"):
        data.as_source([])


def test_grain_map_dataset_is_read_by_index():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    dataset = grain.MapDataset.source(list(range(10))).map(lambda x: {"x": np.int32(x * x)})
    source = data.as_source(dataset)
    assert len(source) == 10
    assert next(source.batches(4, take=8))["x"].tolist() == [0, 1, 4, 9]


def test_filtered_grain_map_dataset_raises_with_a_hint():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    dataset = grain.MapDataset.source(list(range(10))).filter(lambda x: x % 2 == 0)
    with pytest.raises(DataError, match="to_iter_dataset"):
        next(data.as_source(dataset).batches(4))
