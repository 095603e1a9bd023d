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
LONG_MODEL = str(pathlib.Path(__file__).parents[1] / "long_model.py")
SMALL_LSTM = [
    "--module_config.model_config.hidden_size=16",
    "--module_config.model_config.memory_size=32",
    "--module_config.seq_length=16",
]
ADAM = [
    "--module_config.opt_config.optimizer=adam",
    "--module_config.opt_config.learning_rate=5e-4",
]
# As users run programs: one device, all optimizations.
USERS = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}


def train(model, directory, *flags, metric="train/last_loss", env=None):
    words = ["train", model, f"--model_dir={directory}", "--noprogress", *flags]
    command = [sys.executable, "-m", "tekoa.estimator", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    lines = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r[metric] for r in records if metric in r}


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


def check_text(file):
    """Checks that a file reads as if it were written by hand: no Tekoa, no long lines."""
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    words = ["check", "--select=E,F,I,W", "--ignore=E731", "--isolated", "--line-length=100", file]
    done = subprocess.run([ruff, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = file.read_text()
    assert "import tekoa" not in text
    assert "eval(" not in text
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "optimizer", "flags"),
    [
        ("linen", "auto", []),
        ("linen", "", ["--clip_norm=0.5"]),
        ("nnx", "auto", []),
        ("equinox", "auto", []),
        ("haiku", "amos", []),
        ("linen", "amos", []),
    ],
)
def test_plain_file_has_the_losses_of_the_run(library, optimizer, flags, tmp_path, capsys):
    run = tmp_path / "run"
    settings = [f"--module_config.library={library}", f"--module_config.optimizer={optimizer}"]
    recorded = train(MODEL, run, *settings, *flags)
    before = sorted(run.rglob("*"))
    assert main.main(["eject", str(run), f"--out={tmp_path}/plain.py"]) == 0
    assert "plain.npz" in capsys.readouterr().out
    assert sorted(run.rglob("*")) == before
    losses = losses_of(tmp_path / "plain.py", 20)
    assert {step: losses[step - 1] for step in (5, 10, 15, 20)} == recorded
    text = check_text(tmp_path / "plain.py")
    assert len(text.splitlines()) < 235
    for name in ("def unused", "Too narrow", "config"):
        assert name not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags", "n_lines"),
    [
        ("mnist", [], 200),
        ("mnist", ["--module_config.optimizer=amos"], 200),
        ("transformer_lm", [], 285),
        ("lstm_lm", [*SMALL_LSTM, *ADAM], 200),
        ("lstm_lm", SMALL_LSTM, 275),
    ],
)
def test_bundled_model_has_the_same_losses_for_200_steps(model, flags, n_lines, tmp_path):
    flags = [*flags, "--random_seed=3", "--max_train_steps=200", "--check_every_steps=20"]
    recorded = train(model, tmp_path / "run", *flags, env=USERS)
    tekoa.eject(tmp_path / "run", tmp_path / "plain.py")
    losses = losses_of(tmp_path / "plain.py", 200, env=USERS)
    assert len(recorded) == 10
    assert {step: losses[step - 1] for step in recorded} == recorded
    assert len(check_text(tmp_path / "plain.py").splitlines()) < n_lines


@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear_regression", LONG_MODEL])
def test_long_model_file_has_the_same_losses(model, tmp_path):
    flags = ["--random_seed=3", "--max_train_steps=200", "--check_every_steps=1", "--max_ckpt=1"]
    pattern = [] if model == "linear_regression" else ["--train_pattern=dummy://"]
    recorded = train(
        model, tmp_path / "run", *flags, *pattern, metric="train/train_loss", env=USERS
    )
    tekoa.eject(tmp_path / "run", tmp_path / "plain.py")
    losses = losses_of(tmp_path / "plain.py", 200, env=USERS)
    assert dict(enumerate(losses, start=1)) == recorded
    assert len(check_text(tmp_path / "plain.py").splitlines()) < 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accumulate=2"], "--accumulate"),
        (["--remat=dots"], "--remat"),
        (["--optimizer=muon"], "'muon'"),
        (["--optimizer=lbfgs"], "needs the loss"),
    ],
)
def test_what_has_no_plain_equivalent_is_refused(flags, message, tmp_path):
    words = [f"--model_dir={tmp_path}/run", "--max_train_steps=2", "--noprogress", *flags]
    assert main.main(["train", MODEL, *words]) == 0
    with pytest.raises(UsageError, match=message):
        tekoa.eject(tmp_path / "run", tmp_path / "plain.py")
    assert not list(tmp_path.glob("plain*"))


def test_examples_of_fewer_steps_can_be_stored(tmp_path):
    words = [f"--model_dir={tmp_path}/run", "--max_train_steps=6", "--noprogress"]
    assert main.main(["train", MODEL, *words]) == 0
    plain = tmp_path / "plain.py"
    tekoa.eject(tmp_path / "run", plain, n_steps=3)
    assert "3, 5\n" in plain.read_text()
    # What the command wrote is replaced; a file of the user's, such as the model file, is not.
    tekoa.eject(tmp_path / "run", plain, n_steps=2)
    assert "2, 5\n" in plain.read_text()
    plain.write_text("mine = 1\n")
    with pytest.raises(UsageError, match=r"plain\.py exists, and was not written by `tekoa eject`"):
        tekoa.eject(tmp_path / "run", plain)
    assert plain.read_text() == "mine = 1\n"
