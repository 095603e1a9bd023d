"""A23: a restore matches exactly or lists every difference; nothing is cast silently."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import hosts, store
from tekoa.store import errors
from tekoa.store.read import restore


@pytest.fixture
def directory(saved):
    params = {"a": jnp.ones((2, 3)), "b": jnp.arange(4), "c": jnp.zeros(2), "gone": jnp.zeros(1)}
    return saved({"model_params": params, "rng": jax.random.key(1)})


def test_all_differences_are_listed(directory):
    target = {
        "a": jnp.ones((3, 2)),
        "b": jnp.arange(4.0),
        "c": jax.random.key(0),
        "new": jnp.zeros(5),
    }
    with pytest.raises(errors.MismatchError) as caught:
        restore.restore(directory, {"model_params": target, "carry": jnp.zeros(1)})
    lines = sorted(caught.value.differences)
    assert [line.partition(":")[0] for line in lines] == [
        "carry",
        "model_params/a",
        "model_params/b",
        "model_params/c",
        "model_params/gone",
        "model_params/new",
    ]
    assert "float32[2,3], expected float32[3,2]" in lines[1]
    assert "int32[4], expected float32[4]" in lines[2]
    assert "PRNG key" in lines[3]
    assert "only in the checkpoint" in lines[4]
    assert "missing in the checkpoint" in lines[5]
    assert "6 differences" in str(caught.value)


def test_key_with_another_implementation_is_a_difference(directory):
    with pytest.raises(errors.MismatchError, match="rng: stored as"):
        restore.restore(directory, {"rng": jax.random.key(0, impl="rbg")})


def test_dtype_changes_only_on_request(saved):
    directory = saved({"x": {"a": jnp.float32([1.5]), "b": jnp.int32([3])}})
    target = {"x": {"a": jnp.zeros(1, jnp.bfloat16), "b": jnp.zeros(1)}}
    with pytest.raises(errors.MismatchError):
        restore.restore(directory, target)
    tree = restore.restore(directory, target, cast=True).items["x"]
    assert (tree["a"].dtype, tree["b"].dtype) == (jnp.bfloat16, jnp.float32)
    assert (float(tree["a"][0]), float(tree["b"][0])) == (1.5, 3.0)


def test_abstract_targets_return_arrays_on_their_shardings(saved):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    directory = saved({"x": jnp.arange(16.0), "y": jnp.arange(2.0), "k": jax.random.key(3)})
    target = {
        "x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding),
        "y": jax.ShapeDtypeStruct((2,), jnp.float32),
        "k": jax.eval_shape(lambda: jax.random.key(0)),
    }
    items = restore.restore(directory, target).items
    assert items["x"].sharding == sharding
    assert items["x"].tolist() == list(range(16))
    assert isinstance(items["y"], jax.Array)
    assert jax.random.key_data(items["k"]).tolist() == [0, 3]


def test_cast_works_on_sharded_targets(saved):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    directory = saved({"x": jnp.arange(16.0)})
    target = {"x": jax.ShapeDtypeStruct((16,), jnp.bfloat16, sharding=sharding)}
    tree = restore.restore(directory, target, cast=True).items
    assert (tree["x"].dtype, tree["x"].sharding) == (jnp.bfloat16, sharding)


def test_kinds_of_the_target_are_kept(saved):
    directory = saved({"x": {"n": np.arange(2), "p": 3, "j": jnp.ones(1), "f": jax.nn.relu}})
    target = {"x": {"n": np.zeros(2, int), "p": 0, "j": jnp.zeros(1), "f": jnp.tanh}}
    tree = restore.restore(directory, target).items["x"]
    assert type(tree["n"]) is np.ndarray
    assert (type(tree["p"]), tree["p"]) == (int, 3)
    assert isinstance(tree["j"], jax.Array)
    assert tree["f"] is jnp.tanh


def test_64_bit_values_are_not_truncated_silently(saved):
    directory = saved({"x": np.float64([1.0])})
    target = {"x": jax.ShapeDtypeStruct((1,), np.float64)}
    with pytest.raises(errors.MismatchError, match="jax_enable_x64"):
        restore.restore(directory, target)


def test_items_that_are_not_requested_are_not_restored(directory):
    items = restore.restore(directory, {"rng": jax.random.key(0)}).items
    assert list(items) == ["rng"]


def test_restored_arrays_can_be_donated(saved):
    directory = saved({"x": jnp.arange(1000.0)})
    value = restore.restore(directory, {"x": jnp.zeros(1000)}).items["x"]
    assert float(jax.jit(lambda x: x + 1, donate_argnums=0)(value)[-1]) == 1000.0


def test_step_may_be_chosen(directory):
    target = {"rng": jax.random.key(0)}
    assert restore.restore(directory, target, step=5).step == 5
    with pytest.raises(errors.StoreError, match="no step 6"):
        restore.restore(directory, target, step=6)


def test_items_without_leaves_need_not_be_in_the_checkpoint(directory):
    target = {"rng": jax.random.key(0), "carry": None, "optimizer_state": (optax.EmptyState(),)}
    items = restore.restore(directory, target).items
    assert (items["carry"], items["optimizer_state"]) == (None, (optax.EmptyState(),))


def test_other_bytes_on_another_process_are_noticed(tmp_path, on_each, monkeypatch):
    for name, value in (("a", 1.0), ("b", 2.0)):
        with store.Store(tmp_path / name) as writer:
            writer.save(5, {"x": np.full(2, value)})
    local = threading.local()
    monkeypatch.setattr(hosts, "current", lambda: local.group)

    def read(group, *names):
        local.group = group
        return restore.restore(tmp_path / names[group.index], {"x": np.zeros(2)})

    same = on_each(lambda group: read(group, "a", "a"))
    assert [loaded.items["x"].tolist() for loaded in same] == [[1, 1], [1, 1]]
    for error in on_each(lambda group: read(group, "a", "b")):
        assert type(error) is errors.StoreError
        assert "another commit on process 1" in str(error)
