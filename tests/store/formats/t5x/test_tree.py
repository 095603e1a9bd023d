"""T5X: golden checkpoints are read exactly, and what we write has the same bytes."""

import json
import os
import pathlib

import flax.serialization
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.formats.t5x import tree as t5x
from tekoa.store.formats.t5x import zarr

SETS = ["inline_amos", "ts_amos", "ts_amos_sharded", "infer_ts", "inline_chunked", "legacy_gfile"]


def flatten(tree, name=""):
    if not isinstance(tree, dict):
        return {name: tree}
    flat = {}
    for key, child in tree.items():
        flat.update(flatten(child, f"{name}/{key}" if name else key))
    return flat


def axes_of(tree):
    """Returns axes that select the arrays that T5X stored as zarr."""
    if isinstance(tree, dict):
        return {key: axes_of(child) for key, child in tree.items()}
    return ("some",) if isinstance(tree, zarr.Spec) else None


def files_of(directory):
    files = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = pathlib.Path(folder) / name
            files[str(path.relative_to(directory))] = path.read_bytes()
    files.pop("tekoa.manifest", None)
    return files


@pytest.mark.parametrize("name", SETS)
def test_golden_checkpoint_is_read_exactly(golden, name):
    loaded = flatten(t5x.read(golden / name))
    with np.load(golden / name / "expected.npz") as expected:
        assert set(loaded) == set(expected.files)
        for path, value in loaded.items():
            assert isinstance(value, np.ndarray)
            bits = value.view(np.uint16) if value.dtype.name == "bfloat16" else value
            assert bits.dtype == expected[path].dtype
            assert np.array_equal(bits, expected[path])


@pytest.mark.parametrize("name", ["inline_amos", "ts_amos", "infer_ts"])
def test_written_files_have_the_bytes_of_t5x(golden, tmp_path, name):
    source = t5x.find(golden / name)
    written = t5x.write(tmp_path, 3, t5x.read(source), axes=axes_of(t5x.read_tree(source)))
    assert files_of(written) == files_of(source)


def test_large_arrays_are_written_in_chunks_as_by_t5x(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    source = t5x.find(golden / "inline_chunked")
    written = t5x.write(tmp_path, 2, t5x.read(source))
    assert files_of(written) == files_of(source)


def test_golden_leaves_are_stored_as_expected(golden):
    facts = json.loads((golden / "ts_amos" / "expected.json").read_text())["leaves"]
    raw = flatten(t5x.read_tree(t5x.find(golden / "ts_amos")))
    stored = {path: isinstance(leaf, zarr.Spec) for path, leaf in raw.items()}
    assert stored == {path: fact["storage"] == "zarr" for path, fact in facts.items()}


def test_any_tree_can_be_written_and_nothing_is_cast(tmp_path):
    params = {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "n": np.arange(3)}
    tx = optax.chain(optax.clip(1.0), optax.adam(0.1))
    state = {"step": 4, "param_states": tx.init(params)}
    axes = {"target": {"w": ("a", None)}, "state": {"param_states": ((), ({"mu": None},))}}
    t5x.write(tmp_path, 4, {"target": params, "state": state}, axes=axes)
    tree = t5x.read(tmp_path)
    assert tree["target"]["w"].dtype.name == "bfloat16"
    assert tree["target"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tree["target"]["n"].dtype == np.int64
    assert tree["state"]["param_states"]["1"]["0"]["mu"]["w"].shape == (2, 3)
    assert (tree["state"]["step"].dtype, tree["state"]["step"].tolist()) == (np.int32, 4)
    assert (tmp_path / "checkpoint_4" / "target.w" / ".zarray").exists()


def test_only_arrays_with_axes_are_stored_as_zarr(tmp_path):
    tree = {"target": {"a": np.float32(1), "b": np.zeros((0, 2)), "c": np.ones(2)}}
    t5x.write(tmp_path, 1, tree, axes={"target": {"a": (), "b": ("x",), "c": None}})
    raw = t5x.read_tree(tmp_path / "checkpoint_1")["target"]
    assert isinstance(raw["a"], zarr.Spec)
    assert raw["b"].shape == (0, 2)
    assert isinstance(raw["c"], np.ndarray)
    assert float(t5x.read(tmp_path)["target"]["a"]) == 1.0


def test_colliding_and_impossible_names_are_refused_before_anything_is_written(tmp_path):
    tree = {"target": {"a": {"b": np.ones(1)}, "a.b": np.zeros(1)}}
    axes = {"target": {"a": {"b": ()}, "a.b": ()}}
    with pytest.raises(ValueError, match=r"'a\.b' from a/b"):
        t5x.write(tmp_path, 1, tree, axes=axes)
    for key in ("a/b", "..", "", "x\0"):
        with pytest.raises(ValueError, match="is not allowed"):
            t5x.write(tmp_path, 1, {"target": {key: np.ones(1)}})
    assert os.listdir(tmp_path) == []


def test_existing_step_is_not_overwritten(tmp_path):
    t5x.write(tmp_path, 1, {"target": {"a": np.ones(1)}})
    with pytest.raises(errors.StoreError, match="not overwritten"):
        t5x.write(tmp_path, 1, {"target": {"a": np.zeros(1)}})
    assert t5x.read(tmp_path)["target"]["a"].tolist() == [1]


def test_damage_to_a_step_of_ours_is_detected(tmp_path):
    path = t5x.write(tmp_path, 1, {"target": {"a": np.arange(100.0)}}, axes={"target": {"a": ()}})
    data = bytearray((path / "target.a" / "0").read_bytes())
    data[50] ^= 1
    (path / "target.a" / "0").write_bytes(data)
    with pytest.raises(errors.DamagedError, match=r"target\.a/0"):
        t5x.read(tmp_path)


@pytest.mark.parametrize(
    "body", [{}, {"version": 1, "optimizer": {}}, {"version": "3", "optimizer": {}}, [], 7]
)
def test_other_msgpack_files_are_refused(tmp_path, body):
    step = tmp_path / "checkpoint_1"
    step.mkdir()
    (step / "checkpoint").write_bytes(msgpack.packb(body))
    with pytest.raises(errors.DamagedError, match="checkpoint: "):
        t5x.read(tmp_path)


def test_checkpoints_of_other_programs_do_not_count_as_t5x(tmp_path):
    for name, files in {
        "checkpoint_1": {"checkpoint": b"model_checkpoint_path: 'x'"},
        "checkpoint_2": {"checkpoint": b"x", "_METADATA": b"{}"},
        "checkpoint_3": {"other": b""},
    }.items():
        (tmp_path / name).mkdir()
        for file, data in files.items():
            (tmp_path / name / file).write_bytes(data)
    with pytest.raises(errors.StoreError, match="contains no T5X checkpoint"):
        t5x.read(tmp_path)


def test_step_is_chosen_by_number(golden, tmp_path):
    for step in (9, 10):
        t5x.write(tmp_path, step, {"target": {"a": np.full(1, step)}})
    assert t5x.read(tmp_path)["target"]["a"].tolist() == [10]
    assert t5x.read(tmp_path, step=9)["target"]["a"].tolist() == [9]
    with pytest.raises(errors.StoreError, match="step 11"):
        t5x.read(tmp_path, step=11)


@pytest.mark.parametrize(
    "params",
    [
        {"driver": np.ones(1), "kvstore": np.ones(1), "metadata": np.ones(1)},
        {"driver": np.ones(1), "kvstore": {"path": np.ones(1)}, "metadata": {"shape": np.ones(1)}},
        {"__msgpack_chunked_array__": np.ones(1), "w": np.ones(1)},
    ],
    ids=["spec", "nested spec", "chunks of flax"],
)
@pytest.mark.parametrize("item", ["model_params", "carry"])
def test_what_cannot_be_read_back_is_refused_at_save(tmp_path, item, params):
    writer = store.Store(tmp_path, format="t5x", fatal_after=1)
    writer.save(1, {"model_params": {}, item: params})
    with pytest.raises(errors.SaveFailedError, match="cannot be stored in T5X's format"):
        writer.wait()
    writer.close()
    assert writer.steps() == []


def test_a_tree_that_would_be_read_as_an_array_is_refused(tmp_path):
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"0": np.ones(1)}}
    with pytest.raises(ValueError, match=r"Leaf 'a/.*' cannot be stored .* would be read as"):
        t5x.check_readable(tmp_path / "checkpoint", {"a": chunked, "b": np.ones(2)})


def test_uint16_with_axes_is_refused_because_it_would_be_read_as_bfloat16(tmp_path):
    tree = {"target": {"w": np.ones(2, np.uint16)}, "state": {"step": 1}}
    with pytest.raises(ValueError, match="uint16"):
        t5x.write(tmp_path, 1, tree, axes={"target": {"w": ("embed",)}})
    t5x.write(tmp_path, 2, tree)
    assert t5x.read(tmp_path)["target"]["w"].dtype == np.uint16
