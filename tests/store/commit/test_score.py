"""The best score: kept over restarts, zero included, NaN never."""

import math

import pytest

from tekoa.store import errors
from tekoa.store.commit import score


@pytest.mark.parametrize(
    ("mode", "values", "improvements"),
    [
        ("max", [0.5, 0.9, math.nan, 0.1, math.inf], [0.5, 0.9]),
        ("min", [0.5, 0.9, math.nan, 0.1, -math.inf], [0.5, 0.1]),
        ("max", [-1.0, 0.0, 0.0, -0.5], [-1.0, 0.0]),
        ("min", [math.nan, 0.0, 1.0], [0.0]),
    ],
)
def test_only_finite_improvements_count_over_restarts(tmp_path, mode, values, improvements):
    recorded = []
    for value in values:
        best = score.BestScore(tmp_path / "label" / "score", mode=mode)
        if best.is_better(value):
            best.record(value)
            recorded.append(value)
    assert recorded == improvements
    assert float((tmp_path / "label" / "score").read_text()) == improvements[-1]


def test_recording_a_worse_value_raises(tmp_path):
    best = score.BestScore(tmp_path / "score", mode="max")
    best.record(0.25)
    with pytest.raises(ValueError, match=r"0\.1 is not better than 0\.25"):
        best.record(0.1)


def test_unreadable_score_does_not_count_as_none(tmp_path):
    (tmp_path / "score").write_text("???")
    with pytest.raises(errors.DamagedError, match="is not a number"):
        score.BestScore(tmp_path / "score", mode="max")


def test_unknown_mode_raises(tmp_path):
    with pytest.raises(ValueError, match="'min' or 'max'"):
        score.BestScore(tmp_path / "score", mode="highest")
