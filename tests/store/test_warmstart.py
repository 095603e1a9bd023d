"""Warm start: by name, with a report; shapes and dtypes change only on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tekoa.store import errors, warmstart

SOURCE = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32), "old": np.ones(1)}


def test_matching_names_are_taken_and_the_rest_reported():
    target = {"a": jnp.zeros((2, 3)), "new": jnp.full(2, 7.0)}
    taken, table = warmstart.warm_start(target, SOURCE)
    assert taken["a"].tolist() == np.ones((2, 3)).tolist()
    assert taken["new"].tolist() == [7, 7]
    assert table.names("taken") == ["a"]
    assert table.names("missing") == ["new"]
    assert table.names("unexpected") == ["b", "old"]


def test_other_shapes_and_dtypes_are_all_refused():
    target = {"a": jnp.zeros((3, 3)), "b": jnp.zeros(4, jnp.bfloat16)}
    with pytest.raises(errors.MismatchError) as caught:
        warmstart.warm_start(target, SOURCE)
    assert caught.value.differences == ["a", "b"]
    assert "float32[2,3] -> float32[3,3]" in str(caught.value)


def test_they_stay_as_initialised_if_told_so():
    target = {"a": jnp.zeros((3, 3)), "b": jnp.zeros(4)}
    taken, table = warmstart.warm_start(target, SOURCE, strict=False)
    assert float(taken["a"].sum()) == 0
    assert table.names("other shape") == ["a"]


@pytest.mark.parametrize(("shape", "total"), [((1, 2), 2.0), ((3, 4), 6.0), ((2, 5), 6.0)])
def test_common_part_is_taken_on_request(shape, total):
    taken, table = warmstart.warm_start({"a": jnp.zeros(shape)}, SOURCE, slice_shapes=True)
    assert taken["a"].shape == shape
    assert float(taken["a"].sum()) == total
    assert table.names("taken in part") == ["a"]


def test_other_number_of_axes_is_never_sliced():
    with pytest.raises(errors.MismatchError):
        warmstart.warm_start({"a": jnp.zeros(6), "b": jnp.zeros(4)}, SOURCE, slice_shapes=True)


def test_dtype_changes_on_request():
    taken, _ = warmstart.warm_start({"b": jnp.zeros(4, jnp.bfloat16)}, SOURCE, cast=True)
    assert taken["b"].dtype == jnp.bfloat16


def test_structure_and_sharding_of_the_target_are_kept():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    model = nnx.state(nnx.Linear(8, 2, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim == 2 else x, model)
    source = {"kernel": np.ones((8, 2), np.float32), "bias": np.ones(2, np.float32)}
    taken, table = warmstart.warm_start(model, source)
    assert jax.tree.structure(taken) == jax.tree.structure(model)
    assert taken["kernel"][...].sharding == sharding
    assert len(table.names("taken")) == 2


def test_no_match_at_all_is_an_error():
    with pytest.raises(errors.MismatchError, match="No parameter"):
        warmstart.warm_start({"x": jnp.zeros(2)}, SOURCE)
