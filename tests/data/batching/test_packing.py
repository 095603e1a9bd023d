import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa import data
from tekoa.data.batching import packing


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_every_token_is_in_one_place_and_rows_are_full_enough(lengths, capacity):
    plan = packing.plan(np.array(lengths), capacity)
    places = [
        (document, start + at)
        for document, start, size in zip(plan.documents, plan.starts, plan.sizes)
        for at in range(size)
    ]
    expected = [(document, at) for document, n in enumerate(lengths) for at in range(n)]
    assert sorted(places) == expected
    filled = [part.sum() for part in np.split(plan.sizes, plan.ends[:-1])] if places else []
    assert all(0 < n <= capacity for n in filled)
    # Best fit: no two rows could have been one.
    assert all(a + b > capacity for i, a in enumerate(filled) for b in filled[:i])


def make_documents(n=50):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, n)
    return [
        {"tokens": rng.integers(1, 99, size), "weight": np.full(size, at), "name": "x"}
        for at, size in enumerate(lengths)
    ]


def test_packed_rows_resume_and_shard_exactly():
    rows = data.as_source(make_documents()).pack(16, fields=("tokens", "weight"))
    assert set(rows.info.shapes) == {"tokens", "weight", "segments", "positions", "token_mask"}
    batches = rows.batches(4, seed=3, shuffle=True)
    all_batches, states = [], []
    for _ in range(60):
        states.append(json.loads(json.dumps(batches.state())))
        all_batches.append(next(batches))
    for at in (1, 17, 59):
        for count in (1, 2, 4):
            parts = []
            for index in range(count):
                again = rows.batches(4, seed=3, shuffle=True, shard=(index, count))
                again.restore(states[at])
                parts.append(next(again))
            for name, field in all_batches[at].items():
                assert (np.concatenate([part[name] for part in parts]) == field).all()


def test_documents_in_a_row_keep_their_other_fields():
    documents = make_documents()
    for row in data.as_source(documents).pack(16, fields=("tokens", "weight")):
        for segment in range(1, row["segments"].max() + 1):
            inside = row["segments"] == segment
            (at,) = set(row["weight"][inside].tolist())
            assert (row["tokens"][inside] == documents[at]["tokens"]).all()


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(data.DataError, match="can only be read forwards"):
        data.as_source(lambda: iter(make_documents())).pack(8)
    with pytest.raises(data.DataError, match="no documents with tokens"):
        data.as_source([{"tokens": np.zeros(0)}]).pack(8)
    with pytest.raises(ValueError, match="a length of at least 1"):
        data.as_source(make_documents()).pack(0)
