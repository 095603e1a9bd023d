"""Sequences that are cut into shorter ones."""

import numpy as np
import pytest

from tekoa import data
from tekoa.data.batching import lengths
from tekoa.data.batching.schedule import Schedule

TOKENS = np.arange(24 * 8).reshape(24, 8)


def test_the_tokens_stay_the_same_in_the_same_order():
    source = data.as_source({"tokens": TOKENS, "n": np.arange(24)})
    whole = source.batches(4, shuffle=True, seed=3)
    cut = source.batches(4, shuffle=True, seed=3, length={0: 2, 2: 4, 3: 8})
    for i, shape in enumerate([(16, 2), (16, 2), (8, 4), (4, 8), (4, 8)]):
        a, b = next(whole), next(cut)
        assert b["tokens"].shape == shape, i
        np.testing.assert_array_equal(b["tokens"].ravel(), a["tokens"].ravel())
        np.testing.assert_array_equal(b["n"], np.repeat(a["n"], 8 // shape[1]))


def test_shards_concatenate_to_the_batch_and_short_batches_are_cut_too():
    source = data.as_source({"tokens": TOKENS})
    options = {"length": {0: 4, 1: 2}, "epochs": 1, "remainder": "keep"}
    whole = list(source.batches(10, **options))
    assert [len(batch["tokens"]) for batch in whole] == [20, 40, 16]
    parts = [list(source.batches(10, shard=(i, 2), **options)) for i in range(2)]
    for batch, *halves in zip(whole, *parts, strict=True):
        joined = np.concatenate([half["tokens"] for half in halves])
        np.testing.assert_array_equal(batch["tokens"], joined)


def test_packed_rows_keep_their_segments_and_padding_its_mask():
    documents = data.as_source([{"tokens": list(range(1, n))} for n in (5, 4, 7, 3)])
    packed = documents.pack(8)
    (whole,) = packed.batches(4, epochs=1, remainder="pad")
    (cut,) = packed.batches(4, epochs=1, remainder="pad", length=4)
    for name, values in whole.items():
        np.testing.assert_array_equal(
            cut[name].ravel(), np.repeat(values, 2) if values.ndim == 1 else values.ravel()
        )


def test_mistakes_are_named_before_the_first_batch_is_used():
    source = data.as_source({"tokens": TOKENS})
    with pytest.raises(data.DataError, match=r"length=3 must divide .* 8"):
        next(source.batches(4, length={0: 4, 1000: 3}))
    with pytest.raises(ValueError, match="cannot change"):
        source.batches(4, length=4, consecutive=2)
    with pytest.raises(data.DataError, match="Use pack"):
        data.as_source([{"tokens": [1]}]).bucket([1, 2]).batches(1, length=1)
    schedule = Schedule.of("length", 2)
    with pytest.raises(data.DataError, match=r"lengths \[4, 8\]"):
        lengths.cut({"a": TOKENS, "b": TOKENS[:, :4]}, schedule, 0, "two")
    with pytest.raises(data.DataError, match=r"lengths \[\]"):
        lengths.cut({"a": TOKENS[:, 0]}, schedule, 0, "numbers")
