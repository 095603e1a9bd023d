"""Conversion both ways keeps every value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.store import converting, errors, restoring, t5x


def test_there_and_back_is_the_same(saved, tmp_path):
    params = {"w": jnp.arange(4, dtype=jnp.bfloat16)}
    items = {
        "model_params": params,
        "optimizer_state": optax.adam(0.1).init(params),
        "rng": jax.random.key(1),
        "count": 3,
    }
    converting.convert(
        saved(items), tmp_path / "t5x", layout="t5x", axes={"model_params": {"w": ()}}
    )
    converting.convert(tmp_path / "t5x", tmp_path / "back", layout="tekoa")
    restored = restoring.restore(tmp_path / "back", items)
    assert (restored.step, restored.meta) == (5, {"position": 9})
    assert jax.tree.structure(restored.items) == jax.tree.structure(items)
    assert restored.items["model_params"]["w"].tolist() == [0, 1, 2, 3]
    assert restored.items["count"] == 3
    assert set(t5x.read(tmp_path / "t5x")) == {"target", "state"}


def test_golden_checkpoint_becomes_tekoas(golden, tmp_path):
    converting.convert(golden / "ts_amos", tmp_path, layout="tekoa")
    before, after = store.load(golden / "ts_amos"), store.load(tmp_path)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.array_equal(a, b)


def test_existing_step_is_not_overwritten(saved):
    directory = saved({"x": np.ones(1)})
    with pytest.raises(errors.StoreError, match="never overwritten"):
        converting.convert(directory, directory, layout="tekoa")
