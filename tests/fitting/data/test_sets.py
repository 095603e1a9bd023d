import numpy as np
import pytest

from tekoa.fitting.data import forms, sets

X, Y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)


def test_a_fraction_is_held_out_and_no_row_is_in_both():
    train, valid = sets.divide(forms.as_dataset((X, Y)), 0.3, seed=1)
    rows = [
        [int(y) for batch in part.eval_batches(4) for y in part.split(batch)[1][0]]
        for part in (train, valid)
    ]
    assert (len(rows[0]), len(rows[1])) == (7, 3)
    assert sorted(rows[0] + rows[1]) == list(range(10))
    _, again = sets.divide(forms.as_dataset((X, Y)), 0.3, seed=1)
    assert [int(y) for b in again.eval_batches(4) for y in again.split(b)[1][0]] == rows[1]
    with pytest.raises(ValueError, match="between 0 and 1"):
        sets.divide(train, 1.5, seed=0)
    with pytest.raises(ValueError, match="ready batches"):
        sets.divide(forms.as_dataset([(X, Y)]), 0.5, seed=0)


def as_datasets(data, validation):
    return sets.as_datasets(data, validation, inputs=None, targets=None, seed=0)


def test_validation_data_is_one_set_several_by_name_or_none():
    assert as_datasets((X, Y), None)[1] == {}
    assert list(as_datasets((X, Y), (X, Y))[1]) == [""]
    assert list(as_datasets((X, Y), 0.2)[1]) == [""]
    assert list(as_datasets((X, Y), {"a": (X, Y), "b": (X, Y)})[1]) == ["a", "b"]
    table = {"x": X, "y": Y}
    assert list(as_datasets(table, {"x": X.tolist(), "y": Y.tolist()})[1]) == [""]


def test_a_number_that_is_no_fraction_is_refused():
    with pytest.raises(ValueError, match=r"such as 0\.1; got 5"):
        as_datasets((X, Y), 5)
