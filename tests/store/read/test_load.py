"""Loading without classes, from every kind of path and format."""

import jax
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.read import load


def fill(directory, format="native"):
    params = {"dense": {"kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3)}}
    with store.Store(directory, keep=[store.KeepLast(3)], format=format) as writer:
        for step in (1, 2):
            items = {
                "model_params": params,
                "model_state": {},
                "optimizer_state": optax.adam(0.1).init(params),
                "average": params,
                "rng": jax.random.key(step),
            }
            writer.save(step, items, meta={"position": step})
    return params


@pytest.mark.parametrize("format", ["native", "t5x"])
def test_everything_is_loaded_as_nested_dicts_of_numpy(tmp_path, format):
    params = fill(tmp_path, format)
    tree = load.load(tmp_path)
    assert set(tree) == {
        "model_params",
        "model_state",
        "optimizer_state",
        "average",
        "rng",
        "step",
        "meta",
    }
    assert (tree["step"], tree["meta"], tree["rng"].tolist()) == (2, {"position": 2}, [0, 2])
    assert isinstance(tree["model_params"]["dense"]["kernel"], np.ndarray)
    assert np.array_equal(tree["average"]["dense"]["kernel"], params["dense"]["kernel"])
    assert tree["optimizer_state"]["0"]["count"].shape == ()
    assert tree["model_state"] == {}


def test_step_may_be_chosen_by_number_or_path(tmp_path):
    fill(tmp_path)
    assert load.load(tmp_path, step=1)["step"] == 1
    assert load.load(tmp_path / "checkpoint_1")["step"] == 1
    with pytest.raises(errors.StoreError, match=r"no step 7. Existing steps: \[1, 2\]"):
        load.load(tmp_path, step=7)
    with pytest.raises(errors.StoreError, match="is a single step"):
        load.load(tmp_path / "checkpoint_1", step=2)


def test_only_requested_items_are_read(tmp_path):
    fill(tmp_path)
    assert set(load.load(tmp_path, items=["model_params"])) == {"model_params", "step", "meta"}


def test_loaded_arrays_are_writable(tmp_path, golden):
    fill(tmp_path)
    load.load(tmp_path)["model_params"]["dense"]["kernel"][:] = 0
    for name in ("inline_amos", "ts_amos"):
        load.load(golden / name)["model_params"]["embed"]["embedding"][:] = 0


def test_file_with_the_name_of_a_step_is_skipped(tmp_path):
    fill(tmp_path)
    (tmp_path / "checkpoint_9").write_text("")
    assert load.load(tmp_path)["step"] == 2
    with pytest.raises(errors.StoreError, match="contains no checkpoint"):
        load.load(tmp_path / "checkpoint_9")


def test_directory_without_checkpoints_raises(tmp_path):
    with pytest.raises(errors.StoreError, match="contains no checkpoint"):
        load.load(tmp_path)
    with pytest.raises(errors.StoreError, match="contains no checkpoint"):
        load.load(tmp_path / "missing")


def test_t5x_is_detected_as_directory_step_and_file(golden):
    root = golden / "inline_amos"
    for path in (root, root / "checkpoint_7", root / "checkpoint_7" / "checkpoint"):
        tree = load.load(path)
        assert tree["step"] == 7
        with np.load(root / "expected.npz") as expected:
            name = "target/embed/embedding"
            assert np.array_equal(tree["model_params"]["embed"]["embedding"], expected[name])
            assert "1" in tree["optimizer_state"]
            assert "batch_stats" in tree["model_state"]
