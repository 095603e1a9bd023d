"""A1, A15: processes killed at any moment leave whole steps and nothing else."""

import numpy as np
import pytest

from tekoa import store

POINTS = "before_write mid_write before_manifest before_rename after_rename before_gc mid_gc"


def check(result, n_kills, directory):
    assert result["kills"] == n_kills
    assert (result["torn"], result["wrong"], result["left"]) == (0, 0, 0)
    assert result["max_steps_lost"] <= 2
    assert result["ended"]
    assert all(name.startswith("checkpoint_") and "." not in name for name in result["files"])
    assert len(result["files"]) == 2
    # The bits of a run that nobody killed.
    last = store.load(directory)
    x = np.arange(1000, dtype=np.uint32)
    for _ in range(last["step"]):
        x = x * np.uint32(1664525) + np.uint32(1013904223)
    assert all(np.array_equal(leaf, x) for leaf in last["model_params"].values())


@pytest.mark.slow
def test_fifty_kills_at_random_moments(launch, figure, tmp_path):
    process = launch("kills.py", tmp_path, 50)
    code, (result,), errors = process.end(120)
    assert code == 0, errors
    check(result, 50, tmp_path)
    figure(**result, seconds=round(process.seconds, 1))


def test_kill_at_every_named_point(launch, figure, tmp_path):
    process = launch("kills.py", tmp_path, 7, POINTS.replace(" ", ","))
    code, (result,), errors = process.end(60)
    assert code == 0, errors
    check(result, 7, tmp_path)
    figure(**result, seconds=round(process.seconds, 1))
