"""Numbers by batch."""

import itertools

import pytest

from tekoa.data.batching.schedule import Schedule

ROWS = Schedule.of("batch_size", {0: 3, 4: 5, 6: 2})


def test_sums_and_counts_agree_with_a_list():
    listed = [3] * 4 + [5] * 2 + [2] * 20
    totals = [0, *itertools.accumulate(listed)]
    for i, n in enumerate(listed):
        assert (ROWS.at(i), ROWS.total(i)) == (n, totals[i])
    for total in range(totals[-1]):
        n_within = sum(end <= total for end in totals[1:])
        assert ROWS.n_within(total) == n_within
    assert [ROWS.n_same(i) for i in (0, 3, 4)] == [4, 1, 2]
    assert ROWS.n_same(6) > 10**12


def test_a_number_is_a_schedule_without_changes():
    rows = Schedule.of("batch_size", 7)
    assert rows.is_constant
    assert (rows.at(10**12), rows.total(10), rows.n_within(20), rows.as_json()) == (7, 70, 2, 7)
    assert Schedule.of("batch_size", {0: 7, 5: 7}) == rows


def test_text_comes_back():
    assert Schedule.parse("batch_size", ROWS.as_json()) == ROWS
    assert Schedule.parse("batch_size", "3, 6:2,4:5") == ROWS
    assert ROWS.before(5).as_table() == {0: 3, 4: 5}
    assert ROWS.before(0).as_table() == {0: 3}


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({10: 4}, ValueError, "needs a number for step 0"),
        ({}, ValueError, "needs a number for step 0"),
        ({0: 4, 10: 0}, ValueError, "must be at least 1, got 0"),
        ({0: 4, -1: 4}, ValueError, "needs a number for step 0"),
        ({0: 4.5}, TypeError, "whole numbers"),
        ("32", TypeError, "whole numbers"),
    ],
)
def test_mistakes_are_named(numbers, error, message):
    with pytest.raises(error, match=message):
        Schedule.of("batch_size", numbers)


@pytest.mark.parametrize("text", ["", "a", "0:4,b:5", "0:4;10:5", "0:4,10"])
def test_malformed_text_is_named(text):
    with pytest.raises(ValueError, match=r"pairs of step and number|two numbers"):
        Schedule.parse("--batch_schedule", text)
