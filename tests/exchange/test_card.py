"""Model cards."""

import json

import numpy as np

from tekoa.exchange import card
from tekoa.exchange.trained import Trained


def test_the_card_says_what_was_exported(tmp_path):
    weights = Trained(
        params={"w": np.zeros((2, 3))}, variables={}, step=7, metrics={"a": 0.5, "b": np.nan}
    )
    path = card.write(tmp_path / "m.onnx", weights, format="onnx")
    assert path.name == "m.onnx.json"
    contents = json.loads(path.read_text())
    assert contents["format"] == "onnx"
    assert contents["step"] == 7
    assert contents["n_parameters"] == 6
    assert contents["metrics"] == {"a": 0.5, "b": None}
    assert "jax" in contents["versions"]


def test_arrays_are_described_by_dtype_and_shape():
    assert card.arrays({"w": np.zeros((2, 3), np.float32)}) == {"w": "float32[2,3]"}
