"""How lanes are compared and stopped."""

import json
import pathlib

import pytest

import tekoa
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.sweep.lanes import Goal

MODEL = str(pathlib.Path(__file__).parent / "swept_model.py")


def test_goal():
    assert Goal.parse(None).pick({"loss": 1.0, "valid_loss": 2.0}) == ("valid_loss", 2.0)
    assert Goal.parse("accuracy:max").rank(0.9) < Goal.parse("accuracy:max").rank(0.5)
    assert Goal.parse("loss").rank(float("nan")) == float("inf")
    with pytest.raises(UsageError, match="METRIC:max"):
        Goal.parse("loss:most")


@pytest.mark.slow
def test_worse_half_is_stopped_on_the_way(tmp_path):
    grid = {"module_config.rate": [1e-5, 1e-4, 1e-3, 0.1]}
    outcomes = tekoa.sweep(MODEL, grid, model_dir=tmp_path, halving=True)
    assert [outcome.step for outcome in outcomes] == [16, 8, 4, 4]
    assert outcomes[0].lane.values == {"module_config.rate": "0.1"}
    assert outcomes[1].stopped == "in the worse half at step 8"
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["halved"] == [4, 8]
    assert len(record["stopped"]) == 3
