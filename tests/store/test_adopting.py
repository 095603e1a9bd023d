"""Adopting a step: a whole copy elsewhere, or nothing."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from tekoa import store
from tekoa.store import adopting, errors, t5x


def save(directory, *steps):
    with store.Store(directory, keep=[store.KeepEvery(1)]) as writer:
        for step in steps:
            writer.save(step, {"model_params": jnp.full(3, step)}, meta={"n": step})


def test_copy_is_a_step_of_its_own(tmp_path):
    save(tmp_path / "run", 5)
    path = adopting.adopt(tmp_path / "run" / "checkpoint_5", tmp_path / "best", keep=2)
    assert path.resolve() == (tmp_path / "best" / "checkpoint_5").resolve()
    (tmp_path / "run" / "checkpoint_5" / "tekoa.json").write_text("gone")
    tree = store.load(tmp_path / "best")
    assert (tree["model_params"].tolist(), tree["meta"]) == ([5, 5, 5], {"n": 5})


def test_newest_copies_are_kept(tmp_path):
    save(tmp_path / "run", 1, 2, 3)
    for step in (1, 2, 2, 3):
        adopting.adopt(tmp_path / "run" / f"checkpoint_{step}", tmp_path / "best", keep=2)
    assert sorted(os.listdir(tmp_path / "best")) == ["checkpoint_2", "checkpoint_3"]


def test_damaged_step_is_not_copied(tmp_path):
    save(tmp_path / "run", 1)
    (tmp_path / "run" / "checkpoint_1" / "tekoa.json").write_text("{}")
    with pytest.raises(errors.DamagedError, match=r"tekoa\.json"):
        adopting.adopt(tmp_path / "run" / "checkpoint_1", tmp_path / "best", keep=1)
    assert not (tmp_path / "best").exists()


def test_t5x_step_stays_one(tmp_path):
    tree = {"target": {"w": np.ones(2)}, "state": {"step": 4, "param_states": {}}}
    path = t5x.write(tmp_path / "run", 4, tree, axes={"target": {"w": ()}})
    adopting.adopt(path, tmp_path / "best", keep=1)
    assert t5x.read(tmp_path / "best")["target"]["w"].tolist() == [1, 1]
    assert store.inspect(tmp_path / "best")[0].layout == "t5x"
