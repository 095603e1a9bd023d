"""Pins: a step stays readable while it is held, and the writer's directory untouched."""

import errno
import os

import numpy as np
import pytest

from tekoa import store
from tekoa.store import commit, errors, lease, pins


def contents(directory):
    return sorted(str(path) for path in directory.rglob("*"))


def test_held_step_outlives_its_removal(saved, tmp_path):
    directory = saved({"x": np.arange(3)})
    with pins.pinned(directory, 5, tmp_path / "own") as path:
        with lease.held(directory) as held:
            commit.remove(held, 5)
        assert contents(directory) == []
        assert store.load(path)["x"].tolist() == [0, 1, 2]
        assert store.load(path.parent)["step"] == 5
    assert contents(tmp_path / "own") == []


def test_writers_directory_is_not_changed(saved, tmp_path):
    directory = saved({"x": np.arange(3)})
    before = contents(directory)
    with pins.pinned(directory, 5, tmp_path / "own"):
        assert contents(directory) == before
    assert contents(directory) == before


def test_missing_step_is_gone(tmp_path):
    gone = pytest.raises(errors.StepGoneError, match="Take the next step")
    with gone, pins.pinned(tmp_path, 5, tmp_path / "own"):
        pass
    assert contents(tmp_path / "own") == []


def test_step_is_read_in_place_where_links_cannot_be_made(saved, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "another file system")

    directory = saved({"x": np.arange(3)})
    monkeypatch.setattr(os, "link", refuse)
    with pins.pinned(directory, 5, tmp_path / "own") as path:
        assert path == directory / "checkpoint_5"


def test_sweep_removes_pins_of_the_dead_only(tmp_path):
    (tmp_path / ".pin-1" / "checkpoint_5").mkdir(parents=True)
    (tmp_path / "events").mkdir()
    pins.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["events"]
