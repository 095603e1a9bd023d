"""The rules for the files of a step are the same for training, evaluating and inspecting."""

import os

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import durable
from tekoa.store.formats import checked
from tekoa.store.formats.step import open_step
from tekoa.store.read import inspect


@pytest.fixture
def step(saved):
    return saved({"x": np.ones(3)}) / "checkpoint_5"


def problem(step):
    """Returns why a step is unusable; opening and inspecting it must agree."""
    (info,) = inspect.inspect(step.parent, verify="full")
    try:
        open_step(step)
        reason = ""
    except errors.StoreError as error:
        reason = str(error)
    assert info.problem == reason
    return reason


def test_step_that_is_a_link_is_valid(step, tmp_path):
    os.rename(step, tmp_path / "on_another_disk")
    step.symlink_to(tmp_path / "on_another_disk")
    assert problem(step) == ""
    (info,) = inspect.inspect(step.parent)
    assert info.n_bytes > 0
    assert store.restore(step.parent, {"x": np.zeros(3)}).step == 5


def test_link_inside_a_step_is_not_followed(step, tmp_path):
    os.rename(step / "tekoa.json", tmp_path / "tekoa.json")
    (step / "tekoa.json").symlink_to(tmp_path / "tekoa.json")
    assert "is a link" in problem(step)


def test_renamed_step_is_damaged(step):
    os.rename(step, step.with_name("checkpoint_6"))
    assert "contains step 5" in problem(step.with_name("checkpoint_6"))


def test_what_is_not_a_step_is_not_searched(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    step = tmp_path / "run" / "checkpoint_1000"
    step.symlink_to("/")

    def walk(_):
        raise AssertionError("the file system was searched")

    monkeypatch.setattr(durable, "walk", walk)
    assert "no manifest" in problem(step)


@pytest.mark.parametrize("name", ["_METADATA", None])
def test_files_named_checkpoint_of_other_programs_are_not_t5x(tmp_path, name):
    (tmp_path / "checkpoint").write_text("" if name else 'model_checkpoint_path: "x"')
    if name:
        (tmp_path / name).touch()
    assert not checked.is_t5x(tmp_path)
