"""Warm start: by name, with a report; shapes and dtypes change only on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tekoa.store import errors
from tekoa.store.transfer import warm_start

SOURCE = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32), "old": np.ones(1)}


def test_matching_names_are_loaded_and_the_rest_reported():
    target = {"a": jnp.zeros((2, 3)), "new": jnp.full(2, 7.0)}
    params, table = warm_start.warm_start(target, SOURCE)
    assert params["a"].tolist() == np.ones((2, 3)).tolist()
    assert params["new"].tolist() == [7, 7]
    assert table.names("loaded") == ["a"]
    assert table.names("missing") == ["new"]
    assert table.names("unexpected") == ["b", "old"]


def test_all_other_shapes_and_dtypes_are_listed():
    target = {"a": jnp.zeros((3, 3)), "b": jnp.zeros(4, jnp.bfloat16)}
    with pytest.raises(errors.MismatchError) as caught:
        warm_start.warm_start(target, SOURCE)
    assert caught.value.differences == ["a", "b"]
    assert "float32[2,3] -> float32[3,3]" in str(caught.value)


def test_mismatches_keep_their_initial_values_if_not_strict():
    target = {"a": jnp.zeros((3, 3)), "b": jnp.zeros(4)}
    params, table = warm_start.warm_start(target, SOURCE, strict=False)
    assert float(params["a"].sum()) == 0
    assert table.names("other shape") == ["a"]


@pytest.mark.parametrize(("shape", "total"), [((1, 2), 2.0), ((3, 4), 6.0), ((2, 5), 6.0)])
def test_common_part_is_loaded_on_request(shape, total):
    params, table = warm_start.warm_start({"a": jnp.zeros(shape)}, SOURCE, slice_shapes=True)
    assert params["a"].shape == shape
    assert float(params["a"].sum()) == total
    assert table.names("loaded in part") == ["a"]


def test_other_number_of_axes_is_never_sliced():
    with pytest.raises(errors.MismatchError):
        warm_start.warm_start({"a": jnp.zeros(6), "b": jnp.zeros(4)}, SOURCE, slice_shapes=True)


def test_dtype_changes_on_request():
    params, _ = warm_start.warm_start({"b": jnp.zeros(4, jnp.bfloat16)}, SOURCE, cast=True)
    assert params["b"].dtype == jnp.bfloat16


def test_structure_and_sharding_of_the_target_are_kept():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    model = nnx.state(nnx.Linear(8, 2, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim == 2 else x, model)
    source = {"kernel": np.ones((8, 2), np.float32), "bias": np.ones(2, np.float32)}
    params, table = warm_start.warm_start(model, source)
    assert jax.tree.structure(params) == jax.tree.structure(model)
    assert params["kernel"][...].sharding == sharding
    assert len(table.names("loaded")) == 2


def test_no_match_at_all_raises():
    with pytest.raises(errors.MismatchError, match="No parameter"):
        warm_start.warm_start({"x": jnp.zeros(2)}, SOURCE)
