import numpy as np
import pytest

from tekoa import data

KINDS = ("arrays", "sequence", "lines", "iterable", "resumable", "two_arrays")


@pytest.mark.parametrize("kind", KINDS)
def test_length_and_examples_by_number(make_source, kind):
    source = make_source(kind, 13)
    assert len(source) == 13
    assert source[7]["x"] == 7
    assert source[-1]["x"] == 12
    assert source[0]["x"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_index_out_of_range_raises(make_source, kind):
    with pytest.raises(IndexError, match="has 13 examples"):
        make_source(kind, 13)[13]
    with pytest.raises(IndexError, match="has 13 examples"):
        make_source(kind, 13)[-14]


@pytest.mark.parametrize("kind", KINDS)
def test_iteration_yields_one_epoch_in_order(make_source, kind):
    assert [int(example["x"]) for example in make_source(kind, 7)] == list(range(7))


@pytest.mark.parametrize("kind", KINDS)
def test_info_is_available_while_iterating(make_source, kind):
    source = make_source(kind, 9)
    batches = source.batches(2)
    for _ in range(3):
        next(batches)
    assert source.info.shapes == {"x": ()}
    assert next(batches)["x"].tolist() == [6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_sources_multiply_epochs(make_source, kind):
    source = make_source(kind, 4).repeat(2)
    rows = [batch["x"].tolist() for batch in source.batches(4, epochs=2)]
    assert rows == [[0, 1, 2, 3]] * 4
    assert make_source("arrays", 4).repeat(None).batches(4, epochs=1).n_batches is None


def test_two_iterators_over_one_stream_are_independent(make_source):
    source = make_source("resumable", 20)
    a, b = source.batches(3, shuffle=4), source.batches(5)
    rows_a, rows_b = [], []
    for _ in range(9):
        rows_a.append(next(a)["x"].tolist())
        rows_b.append(next(b)["x"].tolist())
        assert a.state()["batch"] == b.state()["batch"]
    assert rows_b == [[at % 20 for at in range(s, s + 5)] for s in range(0, 45, 5)]
    alone = make_source("resumable", 20).batches(3, shuffle=4)
    assert rows_a == [next(alone)["x"].tolist() for _ in range(9)]


def test_shard_index_out_of_range_raises(make_source):
    with pytest.raises(ValueError, match="0 <= index < count"):
        make_source("arrays", 4).shard(2, 2)


def test_text_is_batched_as_objects():
    batch = next(data.as_source([{"text": "a"}, {"text": "bcd"}]).batches(2))
    assert batch["text"].dtype == object
    assert batch["text"].tolist() == ["a", "bcd"]


def test_repr_describes_the_data():
    assert repr(data.as_source({"x": np.zeros(3)})) == "<Source arrays: 3 rows of x float64[]>"
