"""`tekoa.export` and `tekoa.load_weights`."""

import json

import jax
import numpy as np
import pytest
from flax import linen as nn

import tekoa
from tekoa.store import errors

MODEL, X = nn.Dense(3), np.ones((2, 4), np.float32)


@pytest.fixture
def state():
    return tekoa.TrainState.of_parts(MODEL.init(jax.random.key(0), X)["params"], step=3)


def test_the_ending_chooses_the_format(state, tmp_path):
    for ending in ("safetensors", "npz", "orbax"):
        path = tekoa.export(state, tmp_path / f"a.{ending}")
        assert path.exists()
        assert json.loads((tmp_path / f"a.{ending}.json").read_text())["step"] == 3
    with pytest.raises(ValueError, match="does not tell the format"):
        tekoa.export(state, tmp_path / "a.bin")
    with pytest.raises(ValueError, match="Did you mean 'onnx'"):
        tekoa.export(state, tmp_path / "a.bin", to="onxx")


def test_a_program_needs_model_and_inputs(state, tmp_path):
    with pytest.raises(ValueError, match="needs model= and sample inputs="):
        tekoa.export(state, tmp_path / "a.stablehlo")
    path = tekoa.export(state, tmp_path / "a.stablehlo", model=MODEL, inputs=X)
    described = json.loads((tmp_path / "a.stablehlo.json").read_text())
    assert described["inputs"] == [{"name": "input_0", "shape": ["batch", 4], "dtype": "float32"}]
    assert described["outputs"][0]["shape"] == ["batch", 3]
    assert path.stat().st_size


def test_weights_come_back_with_the_same_bits(state, tmp_path):
    rules = {"^kernel": "fc/kernel"}
    path = tekoa.export(state, tmp_path / "a.safetensors", names=rules)
    with pytest.raises(errors.StoreError, match="fit the model"):
        tekoa.load_weights(path, {"other": np.zeros(3, np.float32), **state.params}, names=rules)
    loaded = tekoa.load_weights(path, state.params, names=rules)
    np.testing.assert_array_equal(loaded["kernel"], state.params["kernel"])
    smaller = MODEL.init(jax.random.key(0), X[:, :2])["params"]
    with pytest.raises(errors.StoreError, match=r"kernel.*other shape"):
        tekoa.load_weights(path, smaller, names=rules)
