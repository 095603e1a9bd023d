import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa import data
from tekoa.data.interop import IterableStream
from tekoa.data.readers import views
from tekoa.data.readers.base import DataError, RowRequest, length
from tekoa.data.readers.memory import ArrayReader
from tekoa.data.readers.streams import StreamReader


def arrays(n):
    return ArrayReader({"x": np.arange(n)}, "test")


def stream(n):
    return StreamReader(IterableStream(lambda: ({"x": at} for at in range(n))))


@pytest.mark.parametrize("make", [arrays, stream])
@given(st.integers(1, 30), st.none() | st.integers(0, 40), st.integers(0, 5), st.integers(1, 5))
def test_part_is_a_slice(make, n, limit, start, step):
    expected = list(range(n))[start::step][:limit]
    part = views.part(make(n), limit=limit, start=start, step=step)
    assert length(part) == len(expected)
    if expected:
        rows = part.gather(RowRequest.of_rows(range(len(expected))))
        assert rows["x"].tolist() == expected


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.randoms())
def test_concatenated_parts_form_one_sequence(sizes, random):
    starts = np.cumsum([0, *sizes])
    parts = [
        ArrayReader({"x": np.arange(a, b)}, f"part {a}") for a, b in itertools.pairwise(starts)
    ]
    joined = views.Concatenated(parts)
    rows = list(range(sum(sizes)))
    random.shuffle(rows)
    assert len(joined) == sum(sizes)
    assert joined.gather(RowRequest.of_rows(rows))["x"].tolist() == rows


def test_concatenation_has_the_classes_of_all_parts():
    parts = [ArrayReader({"label": np.array(labels)}, "test") for labels in ([0, 1], [0, 6])]
    assert views.Concatenated(parts).info.n_classes == 7


def classified(labels, classes):
    fields = {"label": np.array(labels)}
    return ArrayReader(fields, "test", n_classes=len(classes), facts={"classes": classes})


def test_parts_with_other_classes_are_numbered_in_the_same_way():
    parts = [classified([0, 1, -1], ["cat", "dog"]), classified([1, 0], ["dog", "ape"])]
    joined = views.Concatenated(parts)
    assert joined.gather(RowRequest.of_rows(range(5)))["label"].tolist() == [1, 2, -1, 0, 2]
    assert joined.info.facts["classes"] == ["ape", "cat", "dog"]
    assert joined.info.n_classes == 3


def test_parts_with_different_fields_raise():
    with pytest.raises(DataError, match="Cannot concatenate data with different fields"):
        views.Concatenated([arrays(3), ArrayReader({"y": np.arange(3)}, "other")])


def test_streams_cannot_be_concatenated():
    with pytest.raises(DataError, match="Cannot concatenate streams"):
        views.Concatenated([arrays(3), stream(3)])


def test_map_and_map_batch_agree():
    source = data.as_source({"x": np.arange(10)})
    each = source.map(lambda example: {"x": example["x"] * 2, "one": 1})
    at_once = source.map_batch(lambda b: {"x": b["x"] * 2, "one": np.ones(len(b["x"]), int)})
    for a, b in zip(each.batches(3, epochs=1), at_once.batches(3, epochs=1), strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["one"], b["one"])


def test_random_maps_depend_on_seed_epoch_and_row_only():
    def noise(example, rng):
        return {"x": example["x"], "noise": rng.random()}

    source = data.as_source({"x": np.arange(12)}).map_with_rng(noise)

    def drawn(**options):
        values = {}
        for batch in source.batches(**{"batch_size": 4, "epochs": 2, **options}):
            for x, value in zip(batch["x"].tolist(), batch["noise"].tolist()):
                values.setdefault(x, []).append(value)
        return values

    usual = drawn()
    assert all(first != second for first, second in usual.values())
    assert drawn(batch_size=3, shuffle=True) == usual
    assert drawn(seed=1) != usual


def test_part_of_mapped_data_is_mapped():
    source = data.as_source(lambda: ({"x": at} for at in range(9)))
    doubled = source.map(lambda example: {"x": 2 * example["x"]})
    assert [example["x"] for example in doubled.take(6).shard(1, 2)] == [2, 6, 10]


def test_info_of_mapped_data_describes_the_result():
    source = data.load("digits://split=test").map(
        lambda example: {"pixels": np.ravel(example["image"]) / 16, "label": example["label"]}
    )
    assert source.info.shapes == {"pixels": (64,), "label": ()}
    assert source.info.n_classes == 10
    assert source.info.value_range is None


def test_value_range_is_kept_if_the_image_is_unchanged():
    source = data.load("digits://split=test").map(lambda example: {**example, "weight": 1.0})
    assert source.info.value_range == (0, 16)


def test_a_map_may_make_examples_of_different_shapes_equal():
    rows = [{"x": np.arange(n)} for n in (1, 3, 2)]
    source = data.as_source(rows)
    mapped = source.map(lambda example: {"n": len(example["x"])})
    assert next(mapped.batches(3))["n"].tolist() == [1, 3, 2]
    assert next(mapped.batches(2))["n"].tolist() == [1, 3]
    # What the map leaves different stays an error, and so does a map of several rows at once.
    for unchanged in (source.map(dict), source.map_batch(dict)):
        with pytest.raises(data.DataError, match=r"Field 'x' .* cannot be stacked"):
            next(unchanged.batches(3))
