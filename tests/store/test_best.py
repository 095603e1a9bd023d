"""The best score: kept over restarts, zero included, NaN never."""

import math

import pytest

from tekoa.store import best, errors


@pytest.mark.parametrize(
    ("mode", "values", "kept"),
    [
        ("max", [0.5, 0.9, math.nan, 0.1, math.inf], [0.5, 0.9]),
        ("min", [0.5, 0.9, math.nan, 0.1, -math.inf], [0.5, 0.1]),
        ("max", [-1.0, 0.0, 0.0, -0.5], [-1.0, 0.0]),
        ("min", [math.nan, 0.0, 1.0], [0.0]),
    ],
)
def test_only_finite_improvements_count_over_restarts(tmp_path, mode, values, kept):
    seen = []
    for value in values:
        score = best.Score(tmp_path / "label" / "score", mode=mode)
        if score.is_better(value):
            score.record(value)
            seen.append(value)
    assert seen == kept
    assert float((tmp_path / "label" / "score").read_text()) == kept[-1]


def test_recording_a_worse_value_is_an_error(tmp_path):
    score = best.Score(tmp_path / "score", mode="max")
    score.record(0.25)
    with pytest.raises(ValueError, match=r"0\.1 is not better than 0\.25"):
        score.record(0.1)


def test_unreadable_score_is_not_taken_for_none(tmp_path):
    (tmp_path / "score").write_text("???")
    with pytest.raises(errors.DamagedError, match="is not a number"):
        best.Score(tmp_path / "score", mode="max")


def test_unknown_mode_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="'min' or 'max'"):
        best.Score(tmp_path / "score", mode="highest")
