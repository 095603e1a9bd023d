"""A program of the user's own, started twice."""

import pathlib

import numpy as np
import pytest

from support import events, processes
from tekoa import load_checkpoint
from tekoa.testing import assert_trees_equal

SCRIPT = pathlib.Path(__file__).with_name("complete_example.py")


def run(directory, n_steps):
    words = ("-W", "error", SCRIPT, directory, str(n_steps))
    env = processes.compile_cache(directory.parent / "programs")
    process = processes.python(*words, env=env, timeout=600)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.slow
def test_the_second_run_resumes_from_the_files_of_the_first(tmp_path):
    first = run(tmp_path / "twice", 20)
    assert "Step 10: Ran 10 train steps in" in first[2]
    assert any(line.startswith("Step 20: eval  accuracy") for line in first)
    second = run(tmp_path / "twice", 40)
    assert second[0] == "Resuming from step 20."
    assert not any(line.startswith("Step 20:") for line in second)
    run(tmp_path / "once", 40)

    twice, once = (load_checkpoint(tmp_path / name) for name in ("twice", "once"))
    assert int(twice["step"]) == 40
    assert_trees_equal(twice["model_params"], once["model_params"])
    assert_trees_equal(twice["optimizer_state"], once["optimizer_state"])

    best = [load_checkpoint(tmp_path / name / "low_eval_loss") for name in ("twice", "once")]
    assert_trees_equal(best[0]["model_params"], best[1]["model_params"])

    curves = events.read_points(tmp_path / "twice")
    for tag in ("train/loss", "eval/loss", "eval/accuracy"):
        steps, values = zip(*curves[tag], strict=True)
        assert steps == (10, 20, 30, 40)
        assert np.isfinite(values).all()
