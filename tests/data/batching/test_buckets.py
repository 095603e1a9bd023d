import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa import data

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=40)


def make_source(lengths, limits=(4, 8, 16)):
    rows = [{"tokens": np.arange(1, n + 1), "i": at} for at, n in enumerate(lengths)]
    return data.as_source(rows).bucket(limits)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 3), st.sampled_from([None, True]))
def test_each_example_occurs_once_per_epoch(lengths, batch_size, epochs, shuffle):
    batches = make_source(lengths).batches(
        batch_size, epochs=epochs, shuffle=shuffle, remainder="keep"
    )
    rows = []
    for batch in batches:
        n = batch["token_mask"].sum(1)
        limit = batch["tokens"].shape[1]
        assert limit in (4, 8, 16)
        # The smallest limit that fits: all rows are of one bucket.
        assert all(limit == min(x for x in (4, 8, 16) if x >= size) for size in n)
        assert (n == np.array(lengths)[batch["i"]]).all()
        assert (batch["tokens"] == np.where(batch["token_mask"], np.arange(1, limit + 1), 0)).all()
        rows += batch["i"].tolist()
    assert sorted(rows) == sorted(list(range(len(lengths))) * epochs)
    assert batches.n_batches == sum(
        -(-epochs * n // batch_size)
        for n in np.bincount(np.searchsorted([4, 8, 16], lengths), minlength=3)
    )


@given(LENGTHS, st.integers(1, 4), st.integers(0, 30))
def test_a_batch_depends_on_its_number_alone(lengths, batch_size, at):
    source = make_source(lengths * batch_size)
    batches = source.batches(2 * batch_size, seed=1, shuffle=True)
    for _ in range(at):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    expected = next(batches)["i"]
    halves = []
    for index in (0, 1):
        half = source.batches(2 * batch_size, seed=1, shuffle=True, shard=(index, 2))
        half.restore(state)
        halves.append(next(half)["i"])
    assert np.concatenate(halves).tolist() == expected.tolist()


def test_lengths_are_mixed_in_an_epoch():
    batches = make_source([3] * 40 + [7] * 40 + [12] * 40).batches(4, epochs=1, shuffle=True)
    limits = [batch["tokens"].shape[1] for batch in batches]
    assert sorted(limits) == [4] * 10 + [8] * 10 + [16] * 10
    assert limits != sorted(limits)


def test_what_has_no_buckets_is_refused():
    with pytest.raises(data.DataError, match=r"row 1: 'tokens' has 20 elements, more than .* 16"):
        make_source([3, 20])
    with pytest.raises(ValueError, match="increasing limits"):
        make_source([3], limits=(8, 4))
    with pytest.raises(data.DataError, match="Use take on the sources before"):
        make_source([3]).take(1)
    with pytest.raises(data.DataError, match="fewer examples in each bucket"):
        make_source([3, 7]).batches(2, epochs=1)
