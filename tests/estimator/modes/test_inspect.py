import shutil
import subprocess
import sys

import numpy as np
import pytest

import tekoa
from tekoa import data
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.modes import inspect
from tekoa.store import t5x
from tekoa.store.commit import paths


def run(directory):
    return inspect.run_inspect(str(directory), RunConfig())


def test_inspect_shows_steps_and_metrics(trained, capsys):
    assert run(trained) == 0
    out = capsys.readouterr().out
    assert "seed 3" in out
    assert out.count("valid, checksums match") == 4
    assert out.count(" native ") == 4
    assert "train/valid_test_accuracy" in out


def test_examples_of_a_mixture_are_counted(tmp_path, capsys):
    source = data.as_source({"x": np.ones((6, 2), np.float32), "y": np.ones(6, np.float32)})
    batches = data.mix({"a": source, "b": source}, {"a": 3, "b": 1}).batches(4)
    tekoa.fit(
        {"w": np.zeros(2, np.float32)},
        batches,
        apply=lambda params, x: x @ params["w"],
        loss="mse",
        optimizer="sgd",
        inputs="x",
        targets="y",
        steps=5,
        directory=tmp_path / "run",
        show_progress=False,
    )
    assert run(tmp_path / "run") == 0
    last = capsys.readouterr().out.split("valid, checksums match")[-1]
    assert "15 examples of a" in last
    assert "5 examples of b" in last


def test_damage_is_shown_and_sets_the_exit_code(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    index = tmp_path / "run" / "checkpoint_10" / "tekoa.json"
    index.write_bytes(index.read_bytes()[:-1])
    assert run(tmp_path / "run") == 65
    assert "tekoa.json" in capsys.readouterr().out


def test_inspect_needs_no_jax(trained):
    program = (
        "import sys; from tekoa.estimator.cli import main; "
        "code = main.main(['inspect', sys.argv[1]]); "
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", program, str(trained)], check=True)


def test_directory_without_checkpoints_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="contains no checkpoints"):
        run(tmp_path)


def test_inspect_of_one_step_shows_its_parameters_and_its_run(trained, capsys):
    assert run(trained / "checkpoint_20") == 0
    out = capsys.readouterr().out
    assert "seed 3" in out
    assert "Dense_1/kernel float32[256,10]" in out
    assert "model_params: 87178 numbers in 8 arrays" in out


def test_steps_of_other_programs_are_marked(tmp_path, capsys):
    path = t5x.write(tmp_path, 7, {"target": {"w": np.ones(2, np.float32)}, "state": {"step": 7}})
    (path / paths.MANIFEST).unlink()
    assert run(tmp_path) == 0
    assert "written by another program, no checksums" in capsys.readouterr().out
    assert run(path) == 0
