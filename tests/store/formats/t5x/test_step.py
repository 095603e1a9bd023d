"""Tekoa's items in T5X's format: exact resume, with T5X's names inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.store import errors, t5x
from tekoa.store.read import restore


def items():
    params = {"dense": {"kernel": jnp.ones((4, 6), jnp.bfloat16), "bias": jnp.zeros(6)}}
    return {
        "model_params": params,
        "model_state": {"batch_stats": {"mean": jnp.ones(3)}},
        "optimizer_state": optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params),
        "average": params,
        "carry": None,
        "rng": jax.random.key(4),
    }


def test_everything_resumes_exactly(saved):
    axes = {"model_params": {"dense": {"kernel": ("in", "out")}}}
    directory = saved(items(), format="t5x", axes=axes)
    restored = restore.restore(directory, items())
    assert (restored.step, restored.meta) == (5, {"position": 9})
    loaded, expected = jax.tree.flatten(restored.items), jax.tree.flatten(items())
    assert loaded[1] == expected[1]
    for a, b in zip(loaded[0], expected[0], strict=True):
        assert a.dtype == b.dtype
        assert bool(jnp.all(a == b))


def test_step_contains_the_names_of_t5x(saved):
    directory = saved(items(), format="t5x", axes={"model_params": {"dense": {"kernel": ()}}})
    tree = t5x.read(directory)
    assert set(tree) == {"target", "state", "flax_mutables"}
    assert tree["state"]["step"].dtype == np.int32
    assert int(tree["state"]["step"]) == 5
    assert "mu" in tree["state"]["param_states"]["1"]["0"]
    assert (directory / "checkpoint_5" / "target.dense.kernel" / "0.0").exists()


def test_arrays_split_over_devices_are_zarr_with_a_chunk_per_shard(saved):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    split = jax.device_put(jnp.arange(32.0).reshape(8, 4), rows)
    same = jax.device_put(jnp.arange(3.0), rows.update(spec=jax.sharding.PartitionSpec()))
    tree = {"model_params": {"w": split, "b": same}, "average": {"w": split + 1, "b": same}}
    directory = saved(tree, format="t5x")
    step = directory / "checkpoint_5"
    chunks = ["0.0", "1.0", "2.0", "3.0"]
    for name in ("target.w", "tekoa.average.w"):
        assert sorted(p.name for p in (step / name).iterdir() if p.name[0] != ".") == chunks
    assert not (step / "target.b").exists()
    np.testing.assert_array_equal(t5x.read(directory)["target"]["w"], split)
    restored = restore.restore(directory, tree).items
    for item, arrays in tree.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(restored[item][name], array)
            assert restored[item][name].sharding == array.sharding


def test_stateless_optimizer_can_be_restored(saved):
    params = {"w": jnp.ones(2)}
    stateless = {"model_params": params, "optimizer_state": optax.sgd(0.1).init(params)}
    directory = saved(stateless, format="t5x")
    assert t5x.read(directory)["state"]["param_states"] == {}
    assert restore.restore(directory, stateless).step == 5


def test_golden_checkpoint_restores_into_sharded_targets(golden):
    root = golden / "ts_amos_sharded"
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    with np.load(root / "expected.npz") as expected:
        flat = {k[7:]: expected[k] for k in expected.files if k.startswith("target/")}
    target = store.load(root)["model_params"]
    kernel = flat["layers_0/mlp/wi/kernel"]
    target["layers_0"]["mlp"]["wi"]["kernel"] = jax.ShapeDtypeStruct(
        kernel.shape, kernel.dtype, sharding=sharding
    )
    tree = restore.restore(root, {"model_params": target}).items["model_params"]
    loaded = tree["layers_0"]["mlp"]["wi"]["kernel"]
    assert loaded.sharding == sharding
    assert np.array_equal(loaded, kernel)
    assert np.array_equal(tree["embed"]["embedding"], flat["embed/embedding"])


def test_target_of_another_shape_is_refused_before_arrays_are_read(golden):
    root = golden / "infer_ts"
    target = {"model_params": {"scale": jnp.zeros(3)}}
    with pytest.raises(errors.MismatchError, match="model_params/embed/embedding: only in"):
        restore.restore(root, target)


def test_step_with_damaged_extra_items_is_skipped(tmp_path):
    with store.Store(tmp_path, format="t5x", keep=[store.KeepLast(2)]) as writer:
        for step in (1, 2):
            writer.save(step, {"model_params": jnp.ones(2), "rng": jax.random.key(step)})
    (tmp_path / "checkpoint_2" / "tekoa_items").write_bytes(b"")
    restored = store.restore(tmp_path, {"rng": jax.random.key(0)})
    assert restored.step == 1


def test_unknown_format_raises(tmp_path):
    with pytest.raises(ValueError, match="'native' or 't5x'"):
        store.Store(tmp_path, format="zip")


def test_checkpoint_for_inference_has_no_optimizer_state(golden):
    assert "optimizer_state" not in store.load(golden / "infer_ts")


def test_step_number_comes_from_the_name_if_not_in_the_tree(tmp_path):
    t5x.write(tmp_path, 8, {"target": {"w": np.ones(1)}})
    assert store.load(tmp_path)["step"] == 8


@pytest.mark.parametrize("state", [{"step": "x"}, {"step": np.ones(2)}, {"step": {"a": 1}}])
def test_unreadable_step_number_is_damage(tmp_path, state):
    t5x.write(tmp_path, 8, {"target": {"w": np.ones(1)}, "state": state})
    with pytest.raises(errors.NothingUsableError, match="has no step number"):
        store.load(tmp_path)
