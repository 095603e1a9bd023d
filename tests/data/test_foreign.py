import itertools
import json

import numpy as np
import pytest

from tekoa import data


def test_every_form_gives_the_same_examples():
    rows = [{"x": at} for at in range(5)]
    forms = [{"x": np.arange(5)}, rows, lambda: iter(rows), iter(rows), (row for row in rows)]
    for form in forms:
        assert [int(example["x"]) for example in data.as_source(form)] == list(range(5))


def test_a_source_stays_itself_and_patterns_are_loaded():
    source = data.as_source("digits://split=test")
    assert data.as_source(source) is source
    assert len(data.as_source(["digits://split=test"])) == 360


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="Cannot read examples from a int"):
        data.as_source(3)


def test_a_grain_stream_is_resumed_by_its_own_state():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    elements = grain.MapDataset.source(list(range(30))).shuffle(seed=1).map(lambda x: {"x": x})
    dataset = elements.to_iter_dataset()
    batches = data.as_source(dataset).batches(4, shuffle=6)
    rows, states = [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(batches.state())))
        rows.append(next(batches)["x"].tolist())
    assert sorted(list(itertools.chain(*rows))[:30]) == list(range(30))
    for at in (5, 9, 0):
        again = data.as_source(dataset).batches(4, shuffle=6)
        again.restore(states[at])
        assert next(again)["x"].tolist() == rows[at]


def test_ready_batches_are_counted_and_resumed():
    ready = [{"x": np.full(2, at)} for at in range(6)]
    batches = data.as_batches(ready)
    next(batches), next(batches)
    state = json.loads(json.dumps(batches.state()))
    again = data.as_batches(ready)
    again.restore(state)
    assert next(again)["x"].tolist() == [2, 2]
    other = data.as_batches(iter(ready))
    with pytest.raises(data.ChangedDataError, match="of 'iterable list', not of 'iterable list_it"):
        other.restore(state)
    other.restore(state, allow_changes=True)
    assert next(other)["x"].tolist() == [2, 2]


def test_ready_grain_batches_are_resumed_by_their_state():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    dataset = grain.MapDataset.source(list(range(30))).to_iter_dataset().batch(5)
    batches = data.as_batches(dataset)
    for _ in range(3):
        next(batches)
    again = data.as_batches(dataset)
    again.restore(json.loads(json.dumps(batches.state())))
    np.testing.assert_array_equal(next(again), next(batches))


def test_going_back_in_ready_batches():
    batches = data.as_batches([{"x": at} for at in range(6)])
    start = batches.state()
    assert [next(batches)["x"] for _ in range(4)] == [0, 1, 2, 3]
    middle = batches.state()
    batches.restore(start)
    assert next(batches)["x"] == 0
    batches.restore(middle)
    assert next(batches)["x"] == 4


def test_our_own_batches_stay_themselves():
    batches = data.as_source({"x": np.arange(5)}).batches(2)
    assert data.as_batches(batches) is batches
