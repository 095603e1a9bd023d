"""`tekoa export`, and weights as `--checkpoint_path`."""

import json

import jax
import numpy as np
import pytest

import tekoa
from tekoa.estimator.cli.main import main
from tekoa.estimator.model_file import names
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.replay.record import read_record
from tekoa.estimator.run import run as runs


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


# Settings that make the bundled models small.
SMALL = {
    "linear_regression": [],
    "mnist": ["--valid_batch_size=64"],
    "lstm_lm": [
        *(
            "--module_config.model_config.hidden_size=16",
            "--module_config.model_config.memory_size=16",
        ),
        *("--num_valid_examples=2", "--train_batch_size=4"),
    ],
    "transformer_lm": [
        *("--module_config.width=16", "--module_config.n_layers=1", "--num_valid_examples=2"),
    ],
}


@pytest.fixture(scope="module", params=names.BUNDLED)
def bundled(request, tmp_path_factory):
    """A short run of a bundled model, its inputs, and the outputs that its predictions use."""
    path = tmp_path_factory.mktemp("bundled") / request.param
    flags = ["--max_train_steps=2", "--noprogress", f"--model_dir={path}"]
    assert main(["train", request.param, *flags, *SMALL[request.param]]) == 0
    run = runs.open_run(read_record(path).starts[-1].config())
    infer, inputs = program_of(run, "predict").inference(str(path / "checkpoint_2"))
    return path, inputs, jax.tree.leaves(infer(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["safetensors", "npz", "orbax"])
def test_weights_of_every_bundled_model_come_back(bundled, ending, tmp_path):
    path, _, _ = bundled
    out = tmp_path / f"weights.{ending}"
    assert main(["export", str(path), f"--out={out}"]) == 0
    params = tekoa.load_checkpoint(path)["model_params"]
    if ending == "safetensors":
        loaded = jax.tree.leaves(tekoa.load_weights(out, params))
    elif ending == "npz":
        loaded = dict(np.load(out)).values()
    else:
        checkpoints = pytest.importorskip("orbax.checkpoint")
        loaded = jax.tree.leaves(checkpoints.StandardCheckpointer().restore(out))
    expected = jax.tree.leaves(params)
    assert sorted(np.asarray(x).tobytes() for x in loaded) == sorted(
        np.asarray(x).tobytes() for x in expected
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", ["stablehlo", "onnx"])
def test_programs_of_every_bundled_model_have_the_outputs_of_predict(bundled, ending, tmp_path):
    path, inputs, expected = bundled
    out = tmp_path / f"program.{ending}"
    if ending == "onnx":
        pytest.importorskip("jax2onnx", reason="needs tekoa[ecosystem-test]")
        runtime = pytest.importorskip("onnxruntime", reason="needs tekoa[ecosystem-test]")
    assert main(["export", str(path), f"--out={out}"]) == 0
    if ending == "stablehlo":
        program = jax.export.deserialize(bytearray(out.read_bytes()))
        outputs = jax.tree.leaves(program.call(*inputs))
    else:
        named = {f"input_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(inputs))}
        outputs = runtime.InferenceSession(str(out)).run(None, named)
    for a, b in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
