"""Mistakes that newcomers make: each gives one message and the right exit code."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from support.processes import LIMIT_SECONDS, python
from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode

TINY = str(pathlib.Path(__file__).parent / "tiny_model.py")

# Reported before JAX is imported, so each can run as a process.
AT_ONCE = {
    "no command": ([], "Usage"),
    "command mistyped": (["trian", "mnist"], "Did you mean 'train'"),
    "flag mistyped": (["train", "mnist", "--max_train_step=3"], "--max_train_steps"),
    "flag of the wrong type": (["train", "mnist", "--max_ckpt=many"], "max_ckpt"),
    "flag out of range": (["train", "mnist", "--train_batch_size=0"], "train_batch_size"),
    "flag without value": (["train", "mnist", "--model_dir"], "model_dir"),
    "wrong precision": (["train", "mnist", "--precision=half"], "float32, bf16"),
    "setting without value": (["train", "mnist", "--module_config.warmup"], "needs a value"),
    "inspect without a directory": (["inspect"], "inspect needs a directory"),
    "inspect a missing directory": (["inspect", "no_such_dir"], "no_such_dir"),
    "too many processes": (["launch", "--processes=100000", "train", "mnist"], "from 1 to 64"),
    "run in a bucket": (["train", "mnist", "--model_dir=gs://bucket"], "a complete bucket"),
}

MISTAKES = {
    "run in memory": (["train", "mnist", "--model_dir=memory://run"], "ends with it"),
    "page in a bucket": (["page", ".", "--out=s3://bucket/page.html"], "--out: "),
    "page of a bucket": (["page", "gs://bucket"], "a complete bucket"),
    "inspect a bucket": (["inspect", "gs://bucket"], "a complete bucket"),
    "convert from a bucket": (["convert", "gs://a", "b", "--to=t5x"], "a complete bucket"),
    "convert into a bucket": (["convert", "a", "gs://b", "--to=t5x"], "only local paths"),
    "start from a bucket": (["train", "mnist", "--checkpoint_path=gs://b"], "--checkpoint_path"),
    "predict into a bucket": (["predict", "mnist", "--pred_output=gs://b/x"], "--pred_output"),
    "cache in a bucket": (["train", "mnist", "--compile_cache=gs://b/x"], "--compile_cache"),
    "model in a bucket": (["train", "gs://bucket/model.py"], "only local paths"),
    "data in a bucket": (["train", "mnist", "--train_pattern=abfs://b/*.npz"], "scheme 'abfs'"),
    "archive in a bucket": (["train", "mnist", "--train_pattern=npz://gs://b/x"], "local paths"),
    "images in a bucket": (
        ["train", "mnist", "--train_pattern=idx://gs://b/split=train"],
        "only local paths",
    ),
    "null character": (["train", "mnist", "--model_dir=run\0"], "null character"),
    "convert without format": (["convert", "a", "b"], "--to"),
    "model mistyped": (["train", "mnits"], "Did you mean 'mnist'"),
    "model file mistyped": (["train", "no_such_model.py"], "no_such_model.py"),
    "model missing": (["train"], "No model given"),
    "two models": (["train", "mnist", "lstm_lm"], "train accepts one model"),
    "pattern matches nothing": (["train", "mnist", "--train_pattern=no_such_*"], "no_such_*"),
    "unknown scheme": (["train", "mnist", "--train_pattern=foo://x"], "foo://"),
    "no such split": (["train", "mnist", "--train_pattern=digits://split=all"], "split"),
    "data of another kind": (
        ["train", "mnist", "--train_pattern=lines.txt", "--train_batch_size=1"],
        "no images with labels",
    ),
    "pattern missing": (["train", TINY, "--model_dir=run", "--valid_pattern=a"], "--train_pattern"),
    "setting mistyped": (["train", "mnist", "--module_config.wormup=3"], "warmup"),
    "setting of the wrong type": (["train", "mnist", "--module_config.warmup=x"], "warmup"),
    "setting of another optimizer": (
        ["train", "mnist", "--module_config.amos_beta=0.98"],
        "--module_config.amos_beta: auto has no such setting",
    ),
    "directory not writable": (["train", "mnist", "--model_dir=/proc/run"], "/proc/run"),
    "directory is a file": (["train", TINY, "--model_dir=lines.txt"], "lines.txt"),
    "start from nothing": (
        ["train", TINY, "--model_dir=run", "--checkpoint_path=no_such_dir"],
        "--checkpoint_path=no_such_dir does not exist",
    ),
    "start from something else": (
        ["train", TINY, "--model_dir=run", "--checkpoint_path=lines.txt"],
        "--checkpoint_path=lines.txt is not a checkpoint",
    ),
    "parts that do not divide": (["train", TINY, "--model_dir=run", "--accumulate=3"], "divide"),
    "no steps per dispatch": (
        ["train", TINY, "--model_dir=run", "--steps_per_dispatch=0"],
        "--steps_per_dispatch",
    ),
    "evaluating an empty directory": (
        ["eval", TINY, "--model_dir=run", "--eval_pattern=a"],
        "no checkpoint yet",
    ),
    "nothing to evaluate": (["eval", TINY, "--model_dir=run"], "--eval_pattern"),
    "nothing to predict": (["predict", TINY, "--model_dir=run"], "--pred_pattern"),
    "predicting an empty directory": (
        ["predict", TINY, "--model_dir=run", "--pred_pattern=a"],
        "no checkpoint yet",
    ),
    "nothing to do": (["--model_dir=x"], "--train_pattern"),
    "two things to do": (["--eval_pattern=a", "--pred_pattern=b"], "--mode"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_mistake_in_the_arguments_is_one_message(name, tmp_path):
    arguments, words = AT_ONCE[name]
    shown = python("-m", "tekoa", *arguments, cwd=tmp_path)
    assert shown.returncode == ExitCode.USAGE
    assert words in shown.stdout + shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_message(name, tmp_path, monkeypatch, capsys):
    arguments, words = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("lines.txt").write_text("one\ntwo\n")
    assert main.main(arguments) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert words in err
    assert err.count("tekoa: ") == 1
    assert len(err.splitlines()) < 5
    assert not pathlib.Path("run").exists()


def test_predict_with_an_unsuitable_model_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", TINY, "--model_dir=run"]) == 0
    command = ["predict", TINY, "--model_dir=run", "--pred_pattern=a"]
    assert main.main([*command, "--module_config.can_predict=no"]) == ExitCode.USAGE
    assert "cannot predict" in capsys.readouterr().err
    # Not the model that was trained.
    assert main.main([*command, "--module_config.n_classes=3"]) == 66
    assert "model_params/Dense_0/kernel" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model mistyped", "directory is a file"])
def test_process_reports_a_mistake_without_a_traceback(name, tmp_path):
    arguments, words = MISTAKES[name]
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    shown = python("-m", "tekoa", *arguments, cwd=tmp_path)
    assert shown.returncode == ExitCode.USAGE
    assert shown.stderr.startswith("tekoa: ")
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at the start", "in training"])
def test_control_c_ends_with_one_line(tmp_path, moment):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tekoa", "train", TINY, f"--model_dir={run}"]
    process = subprocess.Popen(
        [*command, "--max_train_steps=100000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    while moment == "in training" and not (run / "checkpoint_3").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    if moment == "at the start":
        # Before that, Python itself handles the signal.
        _wait_for_jax(process.pid, deadline)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert "Traceback" not in err, err
    if moment == "in training":
        assert process.returncode == 75, err
        assert "Run the same command again to resume." in out
    else:
        assert process.returncode in (75, 130), err


def _wait_for_jax(pid, deadline):
    """Waits until a process has loaded JAX's library, in the middle of its imports."""
    while "jaxlib" not in pathlib.Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_closed_output_pipe_is_not_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", TINY, "--model_dir=run"]) == 0
    command = f"{sys.executable} -m tekoa predict {TINY} --model_dir=run --pred_pattern=a"
    shown = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
        text=True,
        capture_output=True,
        check=True,
    )
    assert shown.stdout.split() == [str(ExitCode.PIPE.value)]
    assert not shown.stderr


@pytest.mark.slow
def test_signal_at_any_moment_of_the_start_ends_with_a_documented_code(tmp_path):
    numbers = itertools.cycle([signal.SIGTERM, signal.SIGHUP])
    codes = {signal.SIGTERM: [], signal.SIGHUP: []}
    for i, (milliseconds, number) in enumerate(zip(range(50, 3200, 350), numbers, strict=False)):
        command = [sys.executable, "-m", "tekoa", "train", TINY, f"--model_dir={tmp_path / str(i)}"]
        # A signal that was ignored would be noticed.
        command.append("--max_train_steps=100000000")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )
        time.sleep(milliseconds / 1000)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_SECONDS)
        assert "Traceback" not in err, err
        # A shell reports a process that was ended by a signal as 128 plus its number.
        code = 128 - process.returncode if process.returncode < 0 else process.returncode
        codes[number].append(code)
    for number, seen in codes.items():
        assert set(seen) <= {ExitCode.STOPPED, 128 + number}, codes
        assert 128 + number in seen, codes
