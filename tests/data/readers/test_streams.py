import itertools
import json
import tracemalloc

import numpy as np
import pytest

from tekoa import data
from tekoa.data.interop import IterableStream
from tekoa.data.readers import streams
from tekoa.data.readers.base import RowRequest
from tekoa.data.readers.streams import StreamReader, TfDataStream


class Counting:
    """An iterable with positions that counts the elements read."""

    def __init__(self, n):
        self.n, self.n_read = n, 0

    def __iter__(self):
        return _CountingIterator(self)


class _CountingIterator:
    def __init__(self, owner):
        self.owner, self.at = owner, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.owner.n:
            raise StopIteration
        self.at += 1
        self.owner.n_read += 1
        return {"x": self.at - 1}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class FakeTfData:
    """The methods of a tf.data.Dataset that tekoa uses."""

    element_spec = {"x": "TensorSpec(shape=(), dtype=int64)"}

    def __init__(self, n, n_skipped=0):
        self.n, self.n_skipped = n, n_skipped

    def skip(self, n):
        return FakeTfData(self.n, self.n_skipped + n)

    def as_numpy_iterator(self):
        return iter([{"x": at} for at in range(self.n_skipped, self.n)])


@pytest.mark.parametrize("shuffle", [None, 50])
def test_restore_reads_at_most_one_shuffle_window(shuffle):
    batches = data.as_source(Counting(10_000)).batches(10, shuffle=shuffle)
    for _ in range(2500):  # Two and a half epochs.
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    counting = Counting(10_000)
    again = data.as_source(counting).batches(10, shuffle=shuffle)
    again.restore(state)
    assert next(again)["x"].tolist() == next(batches)["x"].tolist()
    assert counting.n_read <= 80


def test_stream_without_position_is_reread_from_the_start_of_its_epoch():
    n_read = 0

    def count():
        nonlocal n_read
        for at in range(100):
            n_read += 1
            yield {"x": at}

    batches = data.as_source(count).batches(10)
    for _ in range(35):  # Three and a half epochs.
        next(batches)
    state = batches.state()
    n_read = 0
    again = data.as_source(count).batches(10)
    again.restore(state)
    assert next(again)["x"][0] == 50
    assert n_read <= 61


def test_stream_is_read_no_further_than_needed():
    counting = Counting(1000)
    batches = data.as_source(counting).batches(10)
    for _ in range(5):
        next(batches)
    assert counting.n_read <= 51


def test_only_the_rows_of_the_shard_are_decoded():
    decoded = []

    def decode(raw):
        decoded.append(raw["x"])
        return raw

    reader = StreamReader(IterableStream(Counting(100)), decode)
    batches = data.Source(reader).batches(10, shard=(1, 2))
    for _ in range(3):
        next(batches)
    assert decoded == [5, 6, 7, 8, 9, 15, 16, 17, 18, 19, 25, 26, 27, 28, 29]


def test_iterator_can_be_read_only_once():
    source = data.as_source(iter([{"x": at} for at in range(6)]))
    assert source.info.shapes == {"x": ()}
    batches = source.batches(2, epochs=1)
    assert [batch["x"].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(data.DataError, match="can be read only once"):
        next(source.batches(2))


def test_endless_iterator_is_supported():
    def count():
        at = 0
        while True:
            yield {"x": at}
            at += 1

    batches = data.as_source(count()).batches(4)
    assert batches.n_batches is None
    assert [next(batches)["x"][0] for _ in range(3)] == [0, 4, 8]


def test_stream_that_changes_its_length_raises():
    lengths = iter([7, 5])
    source = data.as_source(lambda: ({"x": at} for at in range(next(lengths))))
    with pytest.raises(data.DataError, match="ended after 5 examples, but its first pass had 7"):
        list(source.batches(7, epochs=2))


def test_empty_stream_raises():
    with pytest.raises(data.DataError, match="has no examples"):
        next(data.as_source(lambda: iter([])).batches(2))
    with pytest.raises(data.DataError, match="contains no examples"):
        _ = data.as_source(lambda: iter([])).info


def test_tf_data_resumes_at_its_position():
    batches = data.as_source(FakeTfData(10)).batches(4)
    rows = [next(batches)["x"].tolist() for _ in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    again = data.as_source(FakeTfData(10)).batches(4)
    again.restore(json.loads(json.dumps(batches.state())))
    assert next(again)["x"].tolist() == [2, 3, 4, 5]


def test_tf_data_position_is_the_number_of_elements_read():
    cursor = TfDataStream(FakeTfData(10)).open(7)
    assert next(cursor)["x"] == 7
    assert cursor.state() == 8


def test_rows_above_the_floor_can_be_requested_in_any_order():
    reader = StreamReader(IterableStream(Counting(30)))
    assert reader.gather(RowRequest.of_rows([9, 3, 5]))["x"].tolist() == [9, 3, 5]
    assert reader.gather(RowRequest.of_rows([4, 12]))["x"].tolist() == [4, 12]


def endless():
    for at in itertools.count():
        yield {"x": np.full(1000, at)}


def test_examples_are_counted_without_holding_them():
    tracemalloc.start()
    try:
        source = data.as_source(lambda: ({"x": np.full(1000, at)} for at in range(10_000)))
        batches = source.batches(10, epochs=1)
        assert batches.n_batches == 1000
        assert tracemalloc.get_traced_memory()[1] < 10_000 * 1000
    finally:
        tracemalloc.stop()
    assert [next(batches)["x"][0, 0] for _ in range(2)] == [0, 10]


def test_the_length_of_a_read_stream_can_be_asked_for():
    source = data.as_source(Counting(25))
    batches = source.batches(4, epochs=2)
    first = [next(batches)["x"].tolist() for _ in range(3)]
    assert (len(source), batches.n_batches) == (25, 12)
    assert first[-1] == [8, 9, 10, 11]
    assert next(batches)["x"].tolist() == [12, 13, 14, 15]


def test_counting_says_what_it_does(monkeypatch, caplog):
    monkeypatch.setattr(streams, "_SECONDS_BETWEEN_LINES", -1e9)
    assert len(data.as_source(Counting(3))) == 3
    assert "Counting the examples of iterable Counting: 3 so far." in caplog.text
    assert "set a number of steps and no epochs" in caplog.text


def test_an_iterator_is_not_held_in_memory_without_limit(monkeypatch):
    monkeypatch.setattr(streams, "_MAX_HELD_BYTES", 10**7)
    with pytest.raises(data.DataError, match=r"more than 2,048 examples, or no end\. .* no epochs"):
        len(data.as_source(endless()))
    assert len(data.as_source({"x": at} for at in range(2500))) == 2500


def test_an_iterator_is_resumed_by_reading_up_to_the_position():
    batches = data.as_source(endless()).batches(4, shuffle=8)
    rows = [next(batches)["x"][:, 0].tolist() for _ in range(5)]
    state = json.loads(json.dumps(batches.state()))
    source = data.as_source(endless())
    assert source.info.shapes == {"x": (1000,)}  # Reads the first example.
    again = source.batches(4, shuffle=8)
    again.restore(state)
    assert next(again)["x"][:, 0].tolist() == next(batches)["x"][:, 0].tolist() != rows[0]


@pytest.mark.parametrize("shuffle", [None, 8])
def test_tensorflows_datasets_are_resumed_at_any_batch(shuffle):
    tf = pytest.importorskip("tensorflow")

    def batches():
        dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(40)})
        dataset = dataset.shuffle(16, seed=1, reshuffle_each_iteration=False)
        return data.as_source(dataset.map(lambda row: {"x": row["x"] + 1})).batches(
            6, shuffle=shuffle
        )

    rows = [next(it)["x"].tolist() for it in [batches()] for _ in range(16)]
    assert sorted(list(itertools.chain(*rows))[:40]) == list(range(1, 41))
    for at in (2, 9):  # In the first epoch, and in the second.
        it = batches()
        for _ in range(at):
            next(it)
        again = batches()
        again.restore(json.loads(json.dumps(it.state())))
        assert [next(again)["x"].tolist() for _ in range(6)] == rows[at : at + 6]


def test_ready_batches_of_tensorflow_are_resumed():
    tf = pytest.importorskip("tensorflow")

    def batches():
        return data.as_batches(tf.data.Dataset.range(20).repeat().batch(3))

    it = batches()
    rows = [next(it).tolist() for _ in range(9)]
    again = batches()
    for _ in range(4):
        next(again)
    third = batches()
    third.restore(json.loads(json.dumps(again.state())))
    assert [next(third).tolist() for _ in range(5)] == rows[4:]
