import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import tekoa as tekoa_lib
from tekoa.estimator import cli


def tekoa(*arguments, cwd=None, timeout=120):
    return subprocess.run(
        [sys.executable, "-m", "tekoa", *arguments],
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        check=False,
    )


def test_help_needs_no_jax_and_names_commands_and_flags():
    program = (
        "import sys; from tekoa.estimator import cli; cli.main(['--help']);"
        "assert 'jax' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, text=True, capture_output=True
    ).stdout
    for word in ["train", "eval_wait", "predict", "inspect", "--model_dir", "--save_high"]:
        assert word in shown


@pytest.mark.parametrize(
    ("command", "has", "lacks"),
    [
        ("train", "--mesh", "--save_high"),
        ("eval_wait", "--save_high", "--train_epochs"),
        ("predict", "--pred_output", "--save_high"),
        ("scales", "--train_pattern", "--mesh"),
        ("page", "--out", "--train_pattern"),
    ],
)
def test_help_of_a_command_shows_its_own_flags_alone(command, has, lacks, capsys):
    assert cli.main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert has in words
    assert lacks not in words


@pytest.mark.slow
def test_second_trainer_is_refused(trained, tmp_path, capsys):
    from tekoa import store

    with store.Store(tmp_path):
        shown = tekoa("train", "mnist", f"--model_dir={tmp_path}", "--max_train_steps=1")
    assert shown.returncode == 73
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_goes_on_to_the_same_bits(tmp_path):
    flags = [
        "train",
        "mnist",
        "--max_train_steps=150",
        "--check_every_steps=25",
        "--random_seed=1",
        "--noprogress",
        "--steps_per_dispatch=1",
    ]
    assert tekoa(*flags, "--model_dir=whole", cwd=tmp_path).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "tekoa", *flags, "--model_dir=parts"], cwd=tmp_path
    )
    parts = pathlib.Path(tmp_path) / "parts"
    deadline = time.monotonic() + 60
    while not (parts / "checkpoint_25").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) in (0, 75)
    assert tekoa(*flags, "--model_dir=parts", cwd=tmp_path).returncode == 0
    code = (
        "import sys, numpy as np, tekoa; from tekoa.core import trees;"
        "a, b = (trees.flatten_named(tekoa.load_checkpoint(d, step=150)['model_params'])"
        " for d in sys.argv[1:]);"
        "assert all((a[k] == b[k]).all() for k in a)"
    )
    subprocess.run([sys.executable, "-c", code, "whole", "parts"], cwd=tmp_path, check=True)


def test_both_names_are_the_same_command_and_tell_their_version():
    for module in ("tekoa", "tekoa.estimator"):
        shown = subprocess.run(
            [sys.executable, "-m", module, "--version"], check=True, text=True, capture_output=True
        )
        assert shown.stdout == f"tekoa {tekoa_lib.__version__}\n"


def test_models_lists_what_is_bundled(capsys):
    assert cli.main(["models"]) == 0
    assert "mnist" in capsys.readouterr().out


def test_convert_writes_what_t5x_reads(trained, tmp_path, capsys):
    assert cli.main(["convert", str(trained), str(tmp_path), "--to=t5x"]) == 0
    assert (tmp_path / "checkpoint_25" / "checkpoint").is_file()
    assert (
        cli.main(
            [
                "eval",
                "mnist",
                f"--model_dir={tmp_path}",
                "--eval_pattern=digits://split=test",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 25
