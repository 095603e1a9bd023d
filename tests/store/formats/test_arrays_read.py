"""Arrays on disk: any dtype and sharding, readable by plain Orbax, bounded memory."""

import contextlib

import etils.epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tekoa.store import errors
from tekoa.store.formats import arrays_read, arrays_write
from tekoa.store.formats.leaves import Leaf


def sharded(value, *spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    return jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.P(*spec)))


def test_plain_orbax_reads_a_committed_step(saved):
    tree = {
        "dense": {"kernel": jnp.ones((2, 3), jnp.bfloat16)},
        "rows": sharded(np.arange(8.0), "a"),
    }
    directory = saved({"model_params": tree, "rng": jax.random.key(3)})
    with ocp.StandardCheckpointer() as reader:
        tree_read = reader.restore(directory / "checkpoint_5" / "default")
    assert np.array_equal(tree_read["model_params"]["dense"]["kernel"], np.ones((2, 3)))
    assert np.array_equal(tree_read["model_params"]["rows"], np.arange(8.0))
    assert tree_read["rng"].tolist() == [0, 3]


def test_plain_orbax_reads_onto_the_sharding_requested(saved):
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    directory = saved({"model_params": {"x": sharded(value, "a", "b"), "n": np.int32(3)}})
    spread = sharded(value, None, "a").sharding
    target = {
        "x": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=spread),
        "n": jax.ShapeDtypeStruct((), np.int32),
    }
    with ocp.StandardCheckpointer() as reader:
        tree_read = reader.restore(directory / "checkpoint_5" / "default", {"model_params": target})
    assert tree_read["model_params"]["x"].sharding == spread
    np.testing.assert_array_equal(tree_read["model_params"]["x"], value)
    assert int(tree_read["model_params"]["n"]) == 3


def test_arrays_that_orbax_wrote_are_read(tmp_path):
    # As in steps of earlier versions, and of other programs.
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    tree = {"x": sharded(value, "a", "b"), "n": np.int32(3), "whole": np.arange(5000.0)}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    folder = etils.epath.Path(tmp_path / "default")
    folder.mkdir()
    with contextlib.closing(handler):
        handler.save(folder, args=ocp.args.PyTreeSave(tree))
        handler.finalize(folder)
    leaves = {
        (name,): Leaf(name=(name,), shape=np.shape(x), dtype=x.dtype.name)
        for name, x in tree.items()
    }
    for shardings in ({}, {("x",): sharded(value, "b").sharding}):
        read = arrays_read.read(tmp_path, leaves, shardings)
        for name, x in tree.items():
            np.testing.assert_array_equal(read[name,], x)


def test_orbax_checkpoint_manager_lists_and_reads_committed_steps(saved):
    directory = saved({"model_params": {"w": jnp.arange(3.0)}})
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", read_only=True)
    with ocp.CheckpointManager(directory, options=options) as manager:
        assert manager.all_steps() == [5]
        tree_read = manager.restore(5, args=ocp.args.StandardRestore())
    assert tree_read["model_params"]["w"].tolist() == [0, 1, 2]


def write(folder, values):
    arrays_write.write(folder, values)
    arrays_write.merge(folder)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e5m2", "bfloat16", "bool", "complex64"])
def test_odd_dtypes_are_stored_sharded_or_not(tmp_path, dtype):
    whole = jnp.arange(8).astype(dtype)
    name = ("x",)
    for value in (whole, sharded(whole, "a"), np.asarray(whole)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        write(folder, {name: value})
        leaf = Leaf(name=name, shape=(8,), dtype=dtype)
        spread = sharded(whole, "b").sharding
        for read in (
            arrays_read.read(folder, {name: leaf}, {}),
            arrays_read.read(folder, {name: leaf}, {name: spread}),
        ):
            assert read[name].dtype == whole.dtype
            assert np.asarray(read[name]).tobytes() == np.asarray(whole).tobytes()


def test_array_is_read_onto_the_sharding_requested(tmp_path):
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    write(tmp_path, {("x",): sharded(value, "a", "b")})
    leaves = {("x",): Leaf(name=("x",), shape=(8, 8), dtype="float32")}
    target = sharded(value, None, ("a", "b")).sharding
    read = arrays_read.read(tmp_path, leaves, {("x",): target})[("x",)]
    assert read.sharding == target
    assert np.array_equal(read, value)


def test_index_that_describes_more_than_the_files_contain_is_refused(tmp_path):
    write(tmp_path, {("x",): np.zeros(4, np.float32)})
    huge = Leaf(name=("x",), shape=(2**40,), dtype="float32")
    with pytest.raises(errors.DamagedError, match="but the files have"):
        arrays_read.read(tmp_path, {("x",): huge}, {})


def test_array_of_another_shape_or_name_is_refused(tmp_path):
    write(tmp_path, {("x",): np.zeros(40, np.float32)})
    other = Leaf(name=("x",), shape=(20,), dtype="float32")
    with pytest.raises(errors.DamagedError, match=r"float32\[40\].*float32\[20\]"):
        arrays_read.read(tmp_path, {("x",): other}, {})
    missing = Leaf(name=("y",), shape=(2,), dtype="float32")
    with pytest.raises(errors.DamagedError, match="'y' cannot be read"):
        arrays_read.read(tmp_path, {("y",): missing}, {})
