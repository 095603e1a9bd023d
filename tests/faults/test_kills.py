"""A1, A15: processes killed at any moment leave complete steps and nothing else."""

import numpy as np
import pytest

from tekoa import store

POINTS = "before_write mid_write before_manifest before_rename after_rename before_gc mid_gc"


def check(result, n_kills, directory, figure):
    assert result["kills"] == n_kills
    counts = {key: result[key] for key in ("torn", "wrong", "left")}
    assert counts == {"torn": 0, "wrong": 0, "left": 0}
    assert result["max_steps_lost"] <= 2
    assert result["ended"]
    assert all(name.startswith("checkpoint_") and "." not in name for name in result["files"])
    assert len(result["files"]) == 2
    # The bits of an undisturbed run.
    last = store.load(directory)
    x = np.arange(1000, dtype=np.uint32)
    for _ in range(last["step"]):
        x = x * np.uint32(1664525) + np.uint32(1013904223)
    assert all(np.array_equal(leaf, x) for leaf in last["model_params"].values())
    figure({"max_steps_lost": result["max_steps_lost"]}, kills=n_kills, **counts)


@pytest.mark.slow
def test_fifty_kills_at_random_moments(launch, figure, tmp_path):
    process = launch("kills.py", tmp_path, 50)
    code, (result,), errors = process.wait()
    assert code == 0, errors
    check(result, 50, tmp_path, figure)


def test_kill_at_every_named_point(launch, figure, tmp_path):
    process = launch("kills.py", tmp_path, 7, POINTS.replace(" ", ","))
    code, (result,), errors = process.wait()
    assert code == 0, errors
    check(result, 7, tmp_path, figure)
