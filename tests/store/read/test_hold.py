"""Held steps stay readable, and the writer's directory is not changed."""

import errno
import os

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import commit, lease
from tekoa.store.read import hold


def contents(directory):
    return sorted(str(path) for path in directory.rglob("*"))


def test_held_step_is_readable_after_its_removal(saved, tmp_path):
    directory = saved({"x": np.arange(3)})
    with hold.pinned(directory, 5, tmp_path / "own") as path:
        with lease.held(directory) as held:
            commit.remove(held, 5)
        assert contents(directory) == []
        assert store.load(path)["x"].tolist() == [0, 1, 2]
        assert store.load(path.parent)["step"] == 5
    assert contents(tmp_path / "own") == []


def test_writers_directory_is_not_changed(saved, tmp_path):
    directory = saved({"x": np.arange(3)})
    before = contents(directory)
    with hold.pinned(directory, 5, tmp_path / "own"):
        assert contents(directory) == before
    assert contents(directory) == before


def test_missing_step_raises_step_gone(tmp_path):
    raises = pytest.raises(errors.StepGoneError, match="Use the next step")
    with raises, hold.pinned(tmp_path, 5, tmp_path / "own"):
        pass
    assert contents(tmp_path / "own") == []


def test_step_is_read_in_place_if_links_are_impossible(saved, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "another file system")

    directory = saved({"x": np.arange(3)})
    monkeypatch.setattr(os, "link", refuse)
    with hold.pinned(directory, 5, tmp_path / "own") as path:
        assert path == directory / "checkpoint_5"


def test_sweep_removes_only_links_of_dead_readers(tmp_path):
    (tmp_path / f".pin-{'0' * 32}" / "checkpoint_5").mkdir(parents=True)
    (tmp_path / "events").mkdir()
    hold.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["events"]
