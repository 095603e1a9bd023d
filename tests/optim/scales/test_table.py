"""The table as users see it and as Amos uses it."""

import numpy as np
import pytest

from tekoa.optim.scales.table import ScaleRow, ScaleTable, UnknownParameterError


def rows():
    return [
        ScaleRow(name=("a", "kernel"), shape=(4, 2), eta=0.5, slot_shape=(1, 2), reason="r1"),
        ScaleRow(
            name=("a", "odd"), shape=(3,), eta=2.0, slot_shape=(), reason="no rule", placed=False
        ),
        ScaleRow(
            name=("stack",),
            shape=(2, 3),
            eta=0.3,
            slot_shape=(2, 1),
            reason="r3",
            eta_by_slice=np.array([[0.1], [0.9]]),
        ),
    ]


def test_rows_are_found_by_position_path_and_name():
    table = ScaleTable(rows())
    assert table[0] is table["a/kernel"] is table["a", "kernel"]
    assert len(table) == len(list(table)) == 3


def test_table_prints_aligned_and_marks_unplaced_rows():
    lines = str(ScaleTable(rows())).split("\n")
    assert lines[0].split() == ["name", "shape", "eta", "slot", "role", "reason"]
    starts = {line.index(word) for line, word in zip(lines, ("reason", "r1", "NOT PLACED", "r3"))}
    assert len(starts) == 1
    assert lines[2].endswith("NOT PLACED: no rule")


def test_unplaced_rows_are_listed():
    assert [row.name for row in ScaleTable(rows()).unplaced] == [("a", "odd")]


def test_table_gives_amos_its_scales_and_slot_shapes():
    table = ScaleTable(rows())
    assert table.eta_fn(("a", "kernel"), (4, 2)) == 0.5
    assert table.shape_fn(("a", "kernel"), (4, 2)) == (1, 2)
    np.testing.assert_array_equal(table.eta_fn(("stack",), (2, 3)), [[0.1], [0.9]])


def test_unknown_parameter_error_names_the_closest_and_prints_as_text():
    message = (
        "The scale table has no parameter 'params/a/kernel'. Did you mean 'a/kernel'? It has a"
    )
    with pytest.raises(UnknownParameterError) as error:
        ScaleTable(rows()).eta_fn(("params", "a", "kernel"), (4, 2))
    assert str(error.value).startswith(message)
    assert isinstance(error.value, LookupError)


def test_a_different_shape_is_an_error_that_shows_both():
    with pytest.raises(ValueError, match=r"has shape \(5, 2\), but .* for shape \(4, 2\)"):
        ScaleTable(rows()).shape_fn(("a", "kernel"), (5, 2))
