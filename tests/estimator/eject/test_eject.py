"""`tekoa eject`: the losses of a run from one plain file, where Tekoa cannot be imported."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import tekoa
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError

MODEL = str(pathlib.Path(__file__).parent / "plain_model.py")
# As users run programs: one device, all optimizations.
USERS = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}


def train(model, directory, *flags, env=None):
    words = ["train", model, f"--model_dir={directory}", "--noprogress", *flags]
    command = [sys.executable, "-m", "tekoa.estimator", *words]
    subprocess.run(command, check=True, capture_output=True, env=env)
    lines = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["train/last_loss"] for r in records if "train/last_loss" in r}


def losses_of(file, n_steps, env=None):
    """Runs an ejected file in a process that cannot import Tekoa."""
    code = "import sys; sys.modules['tekoa'] = None; import json, plain; "
    code += f"print(json.dumps(plain.train({n_steps})[1]))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=False, cwd=file.parent, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "library",
    [
        "linen",
        pytest.param("nnx", marks=pytest.mark.slow),
        pytest.param("equinox", marks=pytest.mark.slow),
    ],
)
def test_plain_file_has_the_losses_of_the_run(library, tmp_path, capsys):
    run = tmp_path / "run"
    recorded = train(MODEL, run, f"--module_config.library={library}")
    before = sorted(run.rglob("*"))
    assert main.main(["eject", str(run), f"--out={tmp_path}/plain.py"]) == 0
    assert "plain.npz" in capsys.readouterr().out
    assert sorted(run.rglob("*")) == before
    losses = losses_of(tmp_path / "plain.py", 20)
    assert {step: losses[step - 1] for step in (5, 10, 15, 20)} == recorded
    text = (tmp_path / "plain.py").read_text()
    assert len(text.splitlines()) < 200
    assert "def unused" not in text
    assert "import tekoa" not in text


@pytest.mark.slow
def test_mnist_has_the_same_losses_for_200_steps(tmp_path):
    flags = ["--random_seed=3", "--max_train_steps=200", "--check_every_steps=20"]
    recorded = train("mnist", tmp_path / "run", *flags, env=USERS)
    tekoa.eject(tmp_path / "run", tmp_path / "plain.py")
    losses = losses_of(tmp_path / "plain.py", 200, env=USERS)
    assert len(recorded) == 10
    assert {step: losses[step - 1] for step in recorded} == recorded


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        (MODEL, ["--accumulate=2"], "--accumulate"),
        (MODEL, ["--module_config.optimizer=auto"], "'auto'"),
        ("linear_regression", ["--max_train_steps=2"], "long form"),
    ],
)
def test_what_has_no_plain_equivalent_is_refused(model, flags, message, tmp_path):
    words = [f"--model_dir={tmp_path}/run", "--max_train_steps=2", "--noprogress", *flags]
    assert main.main(["train", model, *words]) == 0
    with pytest.raises(UsageError, match=message):
        tekoa.eject(tmp_path / "run", tmp_path / "plain.py")
    assert not list(tmp_path.glob("plain*"))
