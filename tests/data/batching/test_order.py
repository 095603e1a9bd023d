import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa import data
from tekoa.data.batching.order import BatchPlan, Order


def order(n, batch_size, **options):
    source = data.as_source([{"x": at} for at in range(n)])
    plan = BatchPlan(batch_size=batch_size, **options)
    return Order(source._reader, plan)


def batches(n, batch_size, n_batches=100, **options):
    rows = order(n, batch_size, **options).rows(0, n_batches)
    return rows.request.rows.reshape(rows.n_batches, -1).tolist()


# Results of the original runner for range(20), at most the first 12 batches
# (tests/golden/jestimator_data_pipeline.txt).
ORIGINAL = {
    "plain": (
        {"batch_size": 3, "epochs": 1},
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17]],
    ),
    "two epochs": (
        {"batch_size": 3, "epochs": 2},
        np.array([*range(20), *range(16)]).reshape(12, 3).tolist(),
    ),
    "consecutive": (
        {"batch_size": 2, "epochs": 1, "consecutive": 3},
        [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11], [12, 15], [13, 16], [14, 17]],
    ),
}


@pytest.mark.parametrize("case", ORIGINAL)
def test_batches_match_the_original_runner(case):
    options, expected = ORIGINAL[case]
    assert batches(20, n_batches=12, **options) == expected


def test_consecutive_groups_continue_in_the_next_epoch():
    # 20 // 3 = 6 groups an epoch, 12 in two, 6 batches of groups of 2, 3 rows each.
    rows = batches(20, 2, epochs=2, consecutive=3)
    assert rows[9:12] == [[0, 3], [1, 4], [2, 5]]
    assert len(rows) == 18


def test_a_batch_can_span_several_epochs():
    assert batches(2, 5, epochs=3, remainder="keep") == [[0, 1, 0, 1, 0], [1, 1, 1, 1, 1]]


def test_shards_are_contiguous_parts():
    parts = [batches(20, 4, epochs=1, shard=(at, 2)) for at in (0, 1)]
    assert parts[0][:2] == [[0, 1], [4, 5]]
    assert parts[1][:2] == [[2, 3], [6, 7]]


def test_padded_rows_are_marked():
    rows = order(5, 4, epochs=1, remainder="pad").rows(0, 10)
    assert rows.request.rows.tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert rows.is_real.tolist() == [[True] * 4, [True, False, False, False]]


def test_padding_keeps_a_short_last_group():
    rows = order(7, 1, epochs=1, remainder="pad", consecutive=3).rows(0, 20)
    assert rows.request.rows[rows.is_real.ravel()].tolist() == list(range(7))
    assert rows.is_real.ravel().tolist() == [True] * 7 + [False] * 2


@given(st.integers(0, 40), st.integers(1, 12))
def test_rows_of_a_batch_do_not_depend_on_the_first_batch_requested(first, n_batches):
    plan = order(50, 4, shuffle=True, seed=3)
    block = plan.rows(first, n_batches)
    for at in range(n_batches):
        one = plan.rows(first + at, 1).request
        assert one.rows.tolist() == block.request.rows.reshape(n_batches, -1)[at].tolist()
        assert one.epochs.tolist() == block.request.epochs.reshape(n_batches, -1)[at].tolist()


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [
        (20, {"batch_size": 3, "epochs": 1}, 6),
        (20, {"batch_size": 3, "epochs": 2}, 13),
        (20, {"batch_size": 3, "epochs": 1, "remainder": "keep"}, 7),
        (20, {"batch_size": 2, "epochs": 1, "consecutive": 3}, 9),
        (20, {"batch_size": 4, "epochs": 1, "consecutive": 3, "remainder": "pad"}, 6),
        (20, {"batch_size": 3}, None),
    ],
)
def test_number_of_batches(n, options, expected):
    assert order(n, **options).n_batches() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"consecutive": 0}, "consecutive must be at least 1"),
        ({"shuffle": 0}, "shuffle must be None, True or at least 1"),
        ({"remainder": "cut"}, "remainder must be 'drop', 'pad' or 'keep', got 'cut'"),
        ({"shard": (2, 2)}, "0 <= index < count"),
        ({"shard": (0, 3)}, "multiple of their number, got 4 rows for 3 shards"),
        ({"remainder": "keep", "consecutive": 2}, "Use 'pad' or 'drop'"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        BatchPlan(**{"batch_size": 4, **options})


def test_fewer_examples_than_a_batch_raise():
    with pytest.raises(data.DataError, match=r"fewer examples \(3 in 1 epochs\) than one batch"):
        order(3, 4, epochs=1).n_batches()
    assert order(3, 4).n_batches() is None


def test_fewer_examples_than_a_group_raise():
    with pytest.raises(data.DataError, match="has no 5 consecutive rows"):
        order(3, 4, consecutive=5).n_batches()
