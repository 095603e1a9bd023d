import pathlib
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tekoa import load_checkpoint
from tekoa.testing import assert_trees_equal

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).with_name("complete_example.py")


def run(directory, n_steps):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(directory), str(n_steps)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_second_run_goes_on_from_the_files_of_the_first(tmp_path):
    first = run(tmp_path / "twice", 20)
    assert "Step 10: Ran 10 train steps in" in first[2]
    assert any(line.startswith("Step 20: eval  accuracy") for line in first)
    second = run(tmp_path / "twice", 40)
    assert second[0] == "Goes on from step 20."
    assert not any(line.startswith("Step 20:") for line in second)
    run(tmp_path / "once", 40)

    twice, once = (load_checkpoint(tmp_path / name) for name in ("twice", "once"))
    assert int(twice["step"]) == 40
    assert_trees_equal(twice["model_params"], once["model_params"])
    assert_trees_equal(twice["optimizer_state"], once["optimizer_state"])

    best = [load_checkpoint(tmp_path / name / "low_eval_loss") for name in ("twice", "once")]
    assert_trees_equal(best[0]["model_params"], best[1]["model_params"])

    reader = EventAccumulator(str(tmp_path / "twice"), size_guidance={"scalars": 0})
    reader.Reload()
    for tag in ("train/loss", "eval/loss", "eval/accuracy"):
        points = reader.Scalars(tag)
        assert [point.step for point in points] == [10, 20, 30, 40]
        assert np.isfinite([point.value for point in points]).all()
