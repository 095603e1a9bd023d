"""The complete example of the original guide runs with only its import lines changed.

The guide is not part of the project: without it beside the checkout there is nothing to run.
"""

import re

import numpy as np
import pytest

from support import events, files, processes
from tekoa import load_checkpoint
from tekoa.testing import assert_trees_equal

GUIDE = files.original("loops_guide.md")
# Modules of the original, and where their names are now.
HOMES = {
    "redex": "tekoa",
    "flax_extra.training": "tekoa",
    "flax_extra.evaluation": "tekoa",
    "flax_extra.checkpoint": "tekoa",
    "flax_extra.model": "tekoa.models",
    "flax_extra": "tekoa",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GUIDE.exists(), reason=f"no original guide in {GUIDE.parent}"),
]


def example():
    """Returns the longest code block of the guide, with other imports."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    text = max(blocks, key=len)
    for module, home in HOMES.items():
        text = re.sub(rf"^from {re.escape(module)} import", f"from {home} import", text, flags=re.M)
    return text


def run(directory, n_steps):
    """Runs the example in another directory, for another number of steps, on short sequences."""
    directory.mkdir(exist_ok=True)
    script = directory / "example.py"
    text = example().replace('"/tmp/', f'"{directory}/').replace("n_steps=8", f"n_steps={n_steps}")
    script.write_text(text.replace("MAX_LENGTH = 256", "MAX_LENGTH = 16"))
    env = processes.compile_cache(directory.parent / "programs")
    process = processes.python("-W", "error", script, env=env, timeout=600)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_the_complete_example_runs_and_a_second_run_resumes(tmp_path):
    first = run(tmp_path / "twice", 6)
    assert any("Step 3: Ran 3 train steps in" in line for line in first)
    assert any(line.startswith("Step 6: eval  lnpp") for line in first)
    second = run(tmp_path / "twice", 8)
    assert not any(line.startswith("Step 6:") for line in second)
    assert any(line.startswith("Step 8: Ran 2 train steps") for line in second)
    run(tmp_path / "once", 8)
    again = run(tmp_path / "once", 8)
    assert again[0] == "Resuming from step 8."
    assert re.fullmatch(r"The lowest value of the metric eval/lnpp is set to \d\.\d{8}\.", again[1])
    assert again[2:] == ["Nothing to train: the loop is at step 8, and n_steps=8 is the total."]

    directories = [tmp_path / name / "checkpoints" for name in ("twice", "once")]
    twice, once = map(load_checkpoint, directories)
    assert int(twice["step"]) == 8
    assert_trees_equal(twice["model_params"], once["model_params"])
    assert_trees_equal(twice["optimizer_state"], once["optimizer_state"])
    best = [load_checkpoint(directory / "low_eval_lnpp") for directory in directories]
    assert_trees_equal(best[0]["model_params"], best[1]["model_params"])

    curves = events.read_points(tmp_path / "twice" / "tensorboard")
    for tag in ("train/loss", "eval/lnpp"):
        steps, values = zip(*curves[tag], strict=True)
        assert steps == (3, 6, 8)
        assert np.isfinite(values).all()
