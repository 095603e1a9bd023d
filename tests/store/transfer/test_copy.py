"""Copies of steps are complete; conversion both ways keeps every value."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.store import errors, t5x
from tekoa.store.read import restore
from tekoa.store.transfer import copy


def test_conversion_to_t5x_and_back_keeps_everything(saved, tmp_path):
    params = {"w": jnp.arange(4, dtype=jnp.bfloat16)}
    items = {
        "model_params": params,
        "optimizer_state": optax.adam(0.1).init(params),
        "rng": jax.random.key(1),
        "count": 3,
    }
    copy.convert(saved(items), tmp_path / "t5x", format="t5x", axes={"model_params": {"w": ()}})
    copy.convert(tmp_path / "t5x", tmp_path / "back", format="native")
    restored = restore.restore(tmp_path / "back", items)
    assert (restored.step, restored.meta) == (5, {"position": 9})
    assert jax.tree.structure(restored.items) == jax.tree.structure(items)
    assert restored.items["model_params"]["w"].tolist() == [0, 1, 2, 3]
    assert restored.items["count"] == 3
    assert set(t5x.read(tmp_path / "t5x")) == {"target", "state"}


def test_golden_checkpoint_is_converted_exactly(golden, tmp_path):
    copy.convert(golden / "ts_amos", tmp_path, format="native")
    before, after = store.load(golden / "ts_amos"), store.load(tmp_path)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.array_equal(a, b)


def test_existing_step_is_not_overwritten(saved):
    directory = saved({"x": np.ones(1)})
    with pytest.raises(errors.StoreError, match="not overwritten"):
        copy.convert(directory, directory, format="native")


def save(directory, *steps):
    with store.Store(directory, keep=[store.KeepEvery(1)]) as writer:
        for step in steps:
            writer.save(step, {"model_params": jnp.full(3, step)}, meta={"n": step})


def test_copy_is_independent_of_the_original(tmp_path):
    save(tmp_path / "run", 5)
    path = copy.copy_step(tmp_path / "run" / "checkpoint_5", tmp_path / "best")
    assert path.resolve() == (tmp_path / "best" / "checkpoint_5").resolve()
    (tmp_path / "run" / "checkpoint_5" / "tekoa.json").write_text("gone")
    tree = store.load(tmp_path / "best")
    assert (tree["model_params"].tolist(), tree["meta"]) == ([5, 5, 5], {"n": 5})


def test_a_step_is_copied_once(tmp_path):
    save(tmp_path / "run", 1)
    for _ in range(2):
        path = copy.copy_step(tmp_path / "run" / "checkpoint_1", tmp_path / "best")
    assert os.listdir(tmp_path / "best") == [path.name]


def test_damaged_step_is_not_copied(tmp_path):
    save(tmp_path / "run", 1)
    (tmp_path / "run" / "checkpoint_1" / "tekoa.json").write_text("{}")
    with pytest.raises(errors.DamagedError, match=r"tekoa\.json"):
        copy.copy_step(tmp_path / "run" / "checkpoint_1", tmp_path / "best")
    assert not (tmp_path / "best").exists()


def test_copy_of_a_t5x_step_is_a_t5x_step(tmp_path):
    tree = {"target": {"w": np.ones(2)}, "state": {"step": 4, "param_states": {}}}
    path = t5x.write(tmp_path / "run", 4, tree, axes={"target": {"w": ()}})
    copy.copy_step(path, tmp_path / "best")
    assert t5x.read(tmp_path / "best")["target"]["w"].tolist() == [1, 1]
    assert store.inspect(tmp_path / "best")[0].format == "t5x"
