import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa import data
from tekoa.data.batching import mixture

SIZES = {"a": 60, "b": 400, "c": 7}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def make_mix(weights=WEIGHTS):
    """Examples are numbered 1000 times the source plus the row."""
    sources = {
        name: data.as_source({"x": np.arange(n) + 1000 * at})
        for at, (name, n) in enumerate(SIZES.items())
    }
    return data.mix(sources, weights)


def draw(batches, n):
    return np.concatenate([next(batches)["x"] for _ in range(n)])


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 10**9))
def test_shares_are_exact_at_any_place(weights, start):
    units = mixture.shares(dict(enumerate(weights)))
    assert sum(units) == 2**30
    slots = np.arange(start, start + 200)
    sources, numbers = mixture._assign(slots, units)
    for source, n in enumerate(units):
        # Each source is numbered without gaps, and never far from its share.
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()
        if len(own):
            assert abs(own[-1] - slots[sources == source][-1] * n / 2**30) <= len(weights)
    counts = mixture._counts(start, units)
    assert counts.sum() == start


@pytest.mark.parametrize("shuffle", [None, True])
def test_shares_and_walks_are_exact(shuffle):
    batches = make_mix().batches(32, seed=3, shuffle=shuffle)
    rows = draw(batches, 467)  # 32 epochs.
    counts = np.bincount(rows // 1000).tolist()
    assert np.abs(np.array(counts) - np.array([0.5, 0.3, 0.2]) * len(rows)).max() <= 2
    assert batches.examples_per_source == dict(zip(SIZES, counts))
    passes = set()
    for at, n in enumerate(SIZES.values()):
        own = rows[rows // 1000 == at] - 1000 * at
        for start in range(0, len(own) - n + 1, n):
            # Each pass has every example once.
            assert sorted(own[start : start + n]) == list(range(n))
            passes.add((n, *own[start : start + n]))
    assert len(passes) > 50 if shuffle else len(passes) == 3


def test_every_epoch_has_the_shares_and_an_order_of_its_own():
    rows = draw(make_mix().batches(467, shuffle=True), 6).reshape(6, 467) // 1000
    counts = np.stack([np.bincount(epoch, minlength=3) for epoch in rows])
    assert np.abs(counts - 467 * np.array([0.5, 0.3, 0.2])).max() <= 2
    assert len({tuple(epoch) for epoch in rows}) == 6


def test_a_mixture_resumes_exactly_on_any_number_of_shards():
    batches = make_mix().batches(12, seed=5, shuffle=True)
    rows, states = [], []
    for _ in range(200):
        states.append(json.loads(json.dumps(batches.state())))
        rows.append(next(batches)["x"].tolist())
    for at in (1, 85, 86, 199):
        for count in (1, 3):
            parts = []
            for index in range(count):
                again = make_mix().batches(12, seed=5, shuffle=True, shard=(index, count))
                again.restore(states[at])
                assert again.examples_per_source == states[at].get("examples_per_source")
                parts += next(again)["x"].tolist()
            assert parts == rows[at]


def test_an_epoch_without_weights_has_each_example_once():
    batches = make_mix(None).batches(10, epochs=1, shuffle=True, remainder="pad")
    rows = [batch["x"][batch["mask"]] for batch in batches]
    assert len(rows) == 47
    assert len(set(np.concatenate(rows).tolist())) == 467
    assert batches.examples_per_source == SIZES


def test_changed_weights_are_noticed():
    state = make_mix().batches(8, shuffle=True).state()
    other = make_mix({"a": 0.4, "b": 0.4, "c": 0.2}).batches(8, shuffle=True)
    with pytest.raises(data.ChangedDataError, match=r"order was 'mixed a 50.*is 'mixed a 40"):
        other.restore(state)


def test_the_size_of_batches_does_not_change_the_order():
    rows = draw(make_mix().batches(1, shuffle=True, seed=3), 2000).tolist()
    batches = make_mix().batches({0: 16, 9: 200, 14: 7}, shuffle=True, seed=3)
    assert draw(batches, 60).tolist() == rows[: 9 * 16 + 5 * 200 + 46 * 7]
    batches.seek(12)
    at = 9 * 16 + 3 * 200
    assert sum(batches.examples_per_source.values()) == at
    assert next(batches)["x"].tolist() == rows[at : at + 200]


def test_workers_make_the_same_batches():
    sizes = {0: 16, 2: 8}
    expected = draw(make_mix().batches(sizes, shuffle=True), 3)
    batches = make_mix().batches(sizes, shuffle=True, workers=1)
    assert draw(batches, 3).tolist() == expected.tolist()
    batches.close()
