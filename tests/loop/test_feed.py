import json
import logging

import grain.python as grain
import numpy as np
import pytest

from tekoa import data as tekoa_data
from tekoa.loop.feed import BatchFeed

X, Y = np.zeros((4, 2), np.float32), np.zeros(4, np.float32)
ROWS = [(np.full((2, 2), i, np.float32), np.zeros(2)) for i in range(9)]


class Pairs(grain.RandomAccessDataSource):
    def __len__(self):
        return 9

    def __getitem__(self, i):
        return ROWS[i]

    def __repr__(self):
        return "Pairs"  # Grain knows a source by it.


def loader():
    sampler = grain.SequentialSampler(9, grain.NoSharding())
    return grain.DataLoader(data_source=Pairs(), sampler=sampler, worker_count=0)


SOURCES = {
    "list": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "tekoa": lambda: tekoa_data.as_source({"x": np.arange(36, dtype=np.float32)}).batches(
        4, shuffle=True, seed=3
    ),
    "grain loader": loader,
    "grain dataset": lambda: grain.MapDataset.source(ROWS).to_iter_dataset(),
    "grain iterator": lambda: iter(grain.MapDataset.source(ROWS).shuffle(seed=1).to_iter_dataset()),
}


def first(batch):
    return np.ravel(batch["x"] if isinstance(batch, dict) else batch[0]).tolist()


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_position_is_restored_after_a_json_round_trip(make):
    feed = BatchFeed(make())
    feed.peek()
    drawn = [first(feed.next()) for _ in range(3)]
    state = json.loads(json.dumps(feed.state))
    rest = [first(feed.next()) for _ in range(4)]
    again = BatchFeed(make())
    again.peek()
    again.restore(state)
    assert [first(again.next()) for _ in range(4)] == rest
    assert drawn[0] not in rest


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_peek_does_not_change_the_position(make):
    feed = BatchFeed(make())
    before = feed.state
    assert first(feed.peek()) == first(feed.peek())
    assert feed.state == before
    peeked = first(feed.peek())
    assert first(feed.next()) == peeked


def test_restoring_a_generator_logs_a_warning(caplog):
    feed = BatchFeed(x for x in ROWS)
    feed.next()
    assert feed.state is None
    with caplog.at_level(logging.WARNING, "tekoa"):
        feed.restore(None)
    (record,) = caplog.records
    assert "Cannot restore the data position (generator)" in record.message
    assert first(feed.next()) == first(ROWS[1])


def test_change_of_structure_raises():
    feed = BatchFeed([(X, Y), (X, {"y": Y})])
    feed.next()
    with pytest.raises(TypeError, match=r"structure of the batches changed from .* to .*1/y"):
        feed.next()


@pytest.mark.parametrize("other", [X[:3], X.astype(np.float16)])
def test_change_of_shape_or_dtype_is_logged_once(caplog, other):
    # The step is compiled once per shape, so going back to an earlier one costs nothing.
    feed = BatchFeed([(X, Y), (X, Y), (other, Y), (other, Y), (X, Y), (other, Y)])
    with caplog.at_level(logging.WARNING, "tekoa"):
        for _ in range(6):
            feed.next()
    (record,) = caplog.records
    assert "from 0 float32[4,2], 1 float32[4] to 0 float" in record.message


def test_the_form_is_the_same_object_until_a_batch_differs():
    feed, forms = BatchFeed([(X, Y), (X + 1, Y), (X[:3], Y[:3]), (X, Y)]), []
    for _ in range(4):
        feed.next()
        forms.append(feed.form)
    assert forms[0] is forms[1]
    assert forms[0] != forms[2]
    assert forms[0] == forms[3]


def test_string_in_a_batch_raises_with_its_name():
    with pytest.raises(TypeError, match="Entry '1'"):
        BatchFeed([(X, "cat")]).peek()


def test_empty_data_raises():
    with pytest.raises(ValueError, match="The data is empty"):
        BatchFeed([]).peek()
