"""`tekoa export`, and weights as `--checkpoint_path`."""

import json

import jax
import numpy as np
import pytest

import tekoa
from tekoa.estimator.cli.main import main


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "tiny"
    flags = ["--max_train_steps=2", "--noprogress", "--valid_batch_size=64"]
    assert main(["train", "mnist", f"--model_dir={path}", *flags]) == 0
    return path


def test_weights_and_program_of_a_run(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run_dir), "--to=safetensors"]) == 0
    assert main(["export", str(run_dir), "--out=m.stablehlo"]) == 0
    assert "Wrote step 2 to m.stablehlo" in capsys.readouterr().out
    described = json.loads((tmp_path / "tiny.safetensors.json").read_text())
    assert described["arrays"]["Conv_1.weight"] == "float32[64,32,3,3]"
    program = jax.export.deserialize(bytearray((tmp_path / "m.stablehlo").read_bytes()))
    assert program.call(np.zeros((3, 8, 8, 1), np.uint8)).shape == (3, 10)

    assert main(["eval", "mnist", f"--model_dir={run_dir}", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    flags = ["--checkpoint_path=tiny.safetensors", "--json", "--model_dir=other"]
    assert main(["eval", "mnist", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == trained["test_accuracy"]

    flags = ["--max_train_steps=1", "--noprogress", "--model_dir=warm"]
    assert main(["train", "mnist", "--checkpoint_path=tiny.safetensors", *flags]) == 0
    assert "loaded 8 of 8 arrays" in capsys.readouterr().out


def test_program_of_a_run_in_the_long_form(tmp_path):
    run, out = tmp_path / "run", tmp_path / "m.stablehlo"
    flags = ["--max_train_steps=2", "--noprogress", f"--model_dir={run}"]
    assert main(["train", "linear_regression", *flags]) == 0
    [kernel] = [
        x for x in jax.tree.leaves(tekoa.load_checkpoint(run)["model_params"]) if x.ndim == 2
    ]
    for path in (run, run / "checkpoint_2"):
        assert main(["export", str(path), f"--out={out}"]) == 0
        program = jax.export.deserialize(bytearray(out.read_bytes()))
        outputs = program.call(np.eye(10, dtype=np.float32))
        np.testing.assert_allclose(outputs[1:] - outputs[:1], kernel[1:] - kernel[:1], atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "export needs a format"),
        (["--to=t5x"], "export needs a format"),
        (["--out=a.bin"], "does not tell the format"),
    ],
)
def test_a_missing_format_is_a_usage_error(run_dir, flags, message, capsys):
    assert main(["export", str(run_dir), *flags]) == 2
    assert message in capsys.readouterr().err


def test_wrong_paths_are_usage_errors(run_dir, tmp_path, capsys):
    assert main(["export", str(tmp_path / "none"), "--to=numpy"]) == 2
    assert "does not exist" in capsys.readouterr().err
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"garbage")
    flags = [f"--model_dir={tmp_path / 'x'}", f"--checkpoint_path={bad}"]
    assert main(["eval", "mnist", *flags]) not in (0, 1)
    assert "is not a safetensors file" in capsys.readouterr().err
