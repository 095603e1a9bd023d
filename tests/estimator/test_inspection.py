import shutil
import subprocess
import sys

import numpy as np
import pytest

from tekoa.estimator import config, inspection
from tekoa.store import names, t5x


def test_steps_sizes_and_metrics_are_shown(trained, capsys):
    assert inspection.show(str(trained)) == 0
    said = capsys.readouterr().out
    assert "seed 3" in said
    assert said.count("whole, checksums agree") == 4
    assert "train/valid_test_accuracy" in said


def test_damage_is_shown_and_changes_the_exit_code(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    index = tmp_path / "run" / "checkpoint_10" / "tekoa.json"
    index.write_bytes(index.read_bytes()[:-1])
    assert inspection.show(str(tmp_path / "run")) == 65
    assert "tekoa.json" in capsys.readouterr().out


def test_inspecting_needs_no_jax(trained):
    program = (
        "import sys; from tekoa.estimator import cli; code = cli.main(['inspect', sys.argv[1]]);"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", program, str(trained)], check=True)


def test_nothing_to_show_is_a_mistake(tmp_path):
    with pytest.raises(config.UsageError, match="holds no checkpoint"):
        inspection.show(str(tmp_path))


def test_one_step_shows_its_parameters_and_its_run(trained, capsys):
    assert inspection.show(str(trained / "checkpoint_20")) == 0
    said = capsys.readouterr().out
    assert "seed 3" in said
    assert "Dense_1/kernel float32[256,10]" in said
    assert "model_params: 87178 numbers in 8 arrays" in said


def test_steps_of_other_programs_are_told_apart(tmp_path, capsys):
    path = t5x.write(tmp_path, 7, {"target": {"w": np.ones(2, np.float32)}, "state": {"step": 7}})
    (path / names.MANIFEST).unlink()
    assert inspection.show(str(tmp_path)) == 0
    assert "of another program, without checksums" in capsys.readouterr().out
    assert inspection.show(str(path)) == 0
