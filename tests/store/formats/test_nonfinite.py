"""NaN and Inf in saved arrays are reported once, by name."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.store.formats import nonfinite


def look(watch, item="optimizer_state", **values):
    return list(watch.look({(item, name): value for name, value in values.items()}))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_arrays_of_every_kind_are_examined(dtype, make):
    value = make(np.array([1, np.inf, np.nan], dtype))
    (line,) = look(nonfinite.Watch(), v=value, w=np.ones(2))
    assert "'optimizer_state/v'" in line
    assert "2 values that are NaN or Inf" in line


def test_blocks_of_a_large_array_are_all_examined(monkeypatch):
    monkeypatch.setattr(nonfinite, "_BLOCK", 4)
    value = np.ones((3, 5))
    value[2, 4] = np.nan
    assert "1 values" in look(nonfinite.Watch(), v=value)[0]


def test_array_is_reported_once_until_it_is_finite_again():
    watch, bad, good = nonfinite.Watch(), np.array([np.inf]), np.array([0.0])
    assert [len(look(watch, v=v)) for v in (bad, bad, good, bad)] == [1, 0, 0, 1]


def test_infinite_initial_values_of_scalars_are_not_reported():
    watch = nonfinite.Watch()
    state = optax.contrib.reduce_on_plateau().init({"w": np.zeros(2)})
    assert np.isinf(state.best_value)
    assert look(watch, best=state.best_value) == []
    assert [len(look(watch, best=np.array(v))) for v in (1.0, np.nan)] == [0, 1]


def test_other_items_and_integers_are_not_examined():
    assert look(nonfinite.Watch(), item="sums", v=np.array([np.nan])) == []
    assert look(nonfinite.Watch(), v=np.array([1])) == []


def test_overflow_of_a_second_moment_is_reported_by_a_save(tmp_path, caplog):
    params = {"w": jnp.ones(2)}
    optimizer = optax.adam(0.1)
    _, state = optimizer.update({"w": jnp.array([1e30, 1.0])}, optimizer.init(params))
    with store.Store(tmp_path) as writer:
        writer.save(7, {"model_params": params, "optimizer_state": state})
    assert "step 7: 'optimizer_state/0/nu/w' (float32[2]) contains 1 values" in caplog.text
    assert np.isinf(store.load(tmp_path)["optimizer_state"]["0"]["nu"]["w"][0])
