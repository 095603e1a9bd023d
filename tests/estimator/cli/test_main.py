import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

import tekoa
from support.processes import python
from tekoa import store
from tekoa.estimator.cli import flags, main


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, ["eval_wait", "--model_dir", "--save_high", "Exit codes:"]),
        (["train", "--help"], 0, ["Usage: tekoa train MODEL [--flags]", "--mesh"]),
        (["launch", "--help"], 0, ["Usage: tekoa launch --processes=N", "--grace"]),
        (["trian", "mnist"], 2, ["Unknown command 'trian'. Did you mean 'train'?"]),
        (["train", "--max_train_step=3"], 2, ["Did you mean '--max_train_steps'"]),
        (["train", "mnist", "lstm_lm"], 2, ["train accepts one model, got 'mnist lstm_lm'."]),
        (["inspect"], 2, ["inspect needs a directory. Usage: tekoa inspect DIR"]),
        (["page"], 2, ["page needs one or more directories. Usage: tekoa page DIR..."]),
        (["models", "mnist"], 2, ["models needs no arguments, got 'mnist'."]),
        (["convert", "a"], 2, ["Usage: tekoa convert SRC DST --to=native|t5x"]),
        (["--noprogress", "launch", "train"], 2, ["launch must be the first argument."]),
        (["--model_dir=x"], 2, ["No command given.", "--train_pattern"]),
    ],
    ids=str,
)
def test_help_and_usage_errors_need_no_jax(arguments, code, words):
    program = (
        "import sys; from tekoa.estimator.cli import main; code = main.main(sys.argv[1:]);"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    shown = python("-c", program, *arguments)
    assert shown.returncode == code, shown.stderr
    for word in words:
        assert word in (shown.stderr if code else shown.stdout)


def test_functions_of_all_commands_exist():
    for command in main.COMMANDS:
        assert callable(command.load())


@pytest.mark.parametrize(
    ("command", "has", "lacks"),
    [
        ("train", "--save_high", "--eval_label"),
        ("eval_wait", "--save_high", "--train_epochs"),
        ("predict", "--pred_output", "--save_high"),
        ("scales", "--train_pattern", "--mesh"),
        ("page", "--out", "--train_pattern"),
    ],
)
def test_help_of_a_command_shows_only_its_flags(command, has, lacks, capsys):
    assert main.main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert has in words
    assert lacks not in words


@pytest.mark.slow
def test_second_trainer_is_refused(tmp_path):
    with store.Store(tmp_path):
        shown = python(
            "-m", "tekoa", "train", "mnist", f"--model_dir={tmp_path}", "--max_train_steps=1"
        )
    assert shown.returncode == 73
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
def test_run_stopped_by_a_signal_resumes_to_the_same_bits(tmp_path):
    command = [
        "train",
        "mnist",
        "--max_train_steps=150",
        "--check_every_steps=25",
        "--random_seed=1",
        "--noprogress",
        "--steps_per_dispatch=1",
    ]
    assert python("-m", "tekoa", *command, "--model_dir=whole", cwd=tmp_path).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "tekoa", *command, "--model_dir=parts"], cwd=tmp_path
    )
    parts = pathlib.Path(tmp_path) / "parts"
    deadline = time.monotonic() + 60
    while not (parts / "checkpoint_25").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) in (0, 75)
    assert python("-m", "tekoa", *command, "--model_dir=parts", cwd=tmp_path).returncode == 0
    code = (
        "import sys, numpy as np, tekoa; from tekoa.core import trees;"
        "a, b = (trees.flatten_named(tekoa.load_checkpoint(d, step=150)['model_params'])"
        " for d in sys.argv[1:]);"
        "assert all((a[k] == b[k]).all() for k in a)"
    )
    subprocess.run([sys.executable, "-c", code, "whole", "parts"], cwd=tmp_path, check=True)


def test_both_module_names_run_the_command():
    for module in ("tekoa", "tekoa.estimator"):
        shown = python("-m", module, "--version")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout == f"tekoa {tekoa.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "has_steps", "command"),
    [
        (["--train_pattern=a"], False, "train"),
        (["--train_pattern=a", "--eval_pattern=b"], True, "eval_wait"),
        (["--eval_pattern=b"], False, "eval_wait"),
        (["--eval_pattern=b"], True, "eval"),
        (["--mode=eval_once"], False, "eval"),
        (["--pred_pattern=c"], True, "predict"),
        (["--pred_pattern=c", "--mode=train"], True, "train"),
    ],
)
def test_flags_select_the_command(tmp_path, arguments, has_steps, command):
    if has_steps:
        (tmp_path / "checkpoint_0").mkdir()
    _, config = flags.parse([f"--model_dir={tmp_path}", *arguments])
    assert main.choose_command(config) == command


@pytest.mark.parametrize(
    "arguments",
    [[], ["--eval_pattern=a", "--pred_pattern=b"], ["--train_pattern=a", "--pred_pattern=b"]],
    ids=str,
)
def test_ambiguous_flags_are_a_usage_error(arguments):
    _, config = flags.parse(arguments)
    with pytest.raises(flags.UsageError):
        main.choose_command(config)


@pytest.mark.parametrize(
    ("words", "closed"),
    [(["train", "--help"], 1), ([], 1), (["trian"], 2), (["trian"], 12)],
    ids=["help", "usage", "error", "both"],
)
def test_closed_output_pipe_is_an_exit_code_without_a_traceback(words, closed):
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout" if fd == "1" else "stderr": writer for fd in str(closed)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    shown = subprocess.run([sys.executable, "-m", "tekoa", *words], check=False, **options)
    os.close(writer)
    assert shown.returncode == 141
    assert not shown.stderr


def test_command_without_standard_output_is_not_an_error():
    command = f"{sys.executable} -m tekoa --version >&-"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, b"")


def test_control_characters_in_messages_are_quoted(tmp_path, capsys):
    path = tmp_path / "a\x1b]0;title\x07\udc80"
    path.mkdir()
    (path / "checkpoint_1").mkdir()
    (path / "checkpoint_1" / "tekoa.manifest").write_text("damaged")
    (path / "checkpoint_2").write_text("")
    (path / "high_\x1b[1m").mkdir()
    (path / "high_\x1b[1m" / "score").write_text("0.5")
    shown = python("-m", "tekoa", "inspect", os.fsencode(path))
    assert shown.returncode == 65
    for output in (shown.stdout, shown.stderr):
        assert "\x1b" not in output
        assert "\\x1b]0;title\\x07\\udc80" in output
    assert "best high_\\x1b[1m: 0.5" in shown.stdout
    (path / "empty").mkdir()
    assert main.main(["convert", str(path / "empty"), str(tmp_path / "copy"), "--to=native"]) == 70
    assert "\\x1b]0;title\\x07\\udc80/empty: contains no checkpoint" in capsys.readouterr().err


def test_documentation_shows_the_real_output_of_a_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "tekoa train mnist --dry_run"
    page = (pathlib.Path(__file__).parents[3] / "docs" / "command.md").read_text()
    shown = re.search(rf"^{command}.*\n```\n\n```\n([^`]*)```", page, re.MULTILINE).group(1)
    assert main.main(command.split()[1:]) == 0
    real = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line != "..."]
    assert without_numbers(lines) == without_numbers(real.splitlines()[: len(lines)])


def without_numbers(lines):
    return [re.sub(r"\d+(\.\d+)?", "N", line) for line in lines]
