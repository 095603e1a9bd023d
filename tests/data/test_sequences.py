import numpy as np
import pytest

from tekoa import data
from tekoa.data.reader import DataError, Draw
from tekoa.data.sequences import SequenceReader


def test_elements_are_decoded():
    reader = SequenceReader(["a b", "c d"], "words", lambda text: {"words": text.split()})
    assert reader.gather(Draw.of_rows([1]))["words"].tolist() == [["c", "d"]]


def test_elements_are_read_together_where_possible():
    class Together(list):
        calls = []

        def __getitems__(self, rows):
            self.calls.append(list(rows))
            return [self[row] for row in rows]

    sequence = Together({"x": at} for at in range(8))
    assert next(data.as_source(sequence).batches(4))["x"].tolist() == [0, 1, 2, 3]
    assert [0, 1, 2, 3] in sequence.calls


def test_an_empty_sequence_is_refused():
    with pytest.raises(DataError, match="list has no example"):
        data.as_source([])


def test_grain_map_datasets_are_read_by_number():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    dataset = grain.MapDataset.source(list(range(10))).map(lambda x: {"x": np.int32(x * x)})
    source = data.as_source(dataset)
    assert len(source) == 10
    assert next(source.batches(4, take=8))["x"].tolist() == [0, 1, 4, 9]


def test_a_filtered_grain_dataset_is_explained():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    dataset = grain.MapDataset.source(list(range(10))).filter(lambda x: x % 2 == 0)
    with pytest.raises(DataError, match="to_iter_dataset"):
        next(data.as_source(dataset).batches(4))
