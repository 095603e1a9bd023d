"""What a newcomer gets wrong within an hour: each is one message and the right exit code."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tekoa.estimator import cli

TINY = str(pathlib.Path(__file__).parent / "tiny_model.py")
LIMIT_SECONDS = 120

# Told before JAX is imported, so each is tried as a process.
AT_ONCE = {
    "no command": ([], "Usage"),
    "command mistyped": (["trian", "mnist"], "Did you mean 'train'"),
    "flag mistyped": (["train", "mnist", "--max_train_step=3"], "--max_train_steps"),
    "flag of the wrong type": (["train", "mnist", "--max_ckpt=many"], "max_ckpt"),
    "flag out of range": (["train", "mnist", "--train_batch_size=0"], "train_batch_size"),
    "flag without value": (["train", "mnist", "--model_dir"], "model_dir"),
    "wrong precision": (["train", "mnist", "--precision=half"], "float32, bf16"),
    "setting without value": (["train", "mnist", "--module_config.warmup"], "needs a value"),
    "inspect what?": (["inspect"], "Which directory"),
    "inspect nothing": (["inspect", "no_such_dir"], "no_such_dir"),
    "convert without format": (["convert", "a", "b"], "--to"),
}

MISTAKES = {
    "model mistyped": (["train", "mnits"], "Did you mean 'mnist'"),
    "model file mistyped": (["train", "no_such_model.py"], "no_such_model.py"),
    "model missing": (["train"], "Which model"),
    "two models": (["train", "mnist", "lstm_lm"], "One model at a time"),
    "directory missing": (["train", TINY], "--model_dir"),
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
    "directory not writable": (["train", "mnist", "--model_dir=/proc/run"], "/proc/run"),
    "directory is a file": (["train", TINY, "--model_dir=lines.txt"], "lines.txt"),
    "start from nothing": (
        ["train", TINY, "--model_dir=run", "--checkpoint_path=no_such_dir"],
        "--checkpoint_path=no_such_dir does not exist",
    ),
    "start from something else": (
        ["train", TINY, "--model_dir=run", "--checkpoint_path=lines.txt"],
        "--checkpoint_path=lines.txt is no checkpoint",
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


def tekoa(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "tekoa", *arguments],
        cwd=cwd,
        timeout=LIMIT_SECONDS,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_mistake_in_the_words_is_one_message(name, tmp_path):
    arguments, words = AT_ONCE[name]
    shown = tekoa(*arguments, cwd=tmp_path)
    assert shown.returncode == cli.EXIT_USAGE
    assert words in shown.stdout + shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(name, tmp_path, monkeypatch, capsys):
    arguments, words = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("lines.txt").write_text("one\ntwo\n")
    assert cli.main(arguments) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert words in said
    assert said.count("tekoa: ") == 1
    assert len(said.splitlines()) < 5
    assert not pathlib.Path("run").exists()


def test_predicting_without_a_predictor_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", TINY, "--model_dir=run"]) == 0
    command = ["predict", TINY, "--model_dir=run", "--pred_pattern=a"]
    assert cli.main([*command, "--module_config.can_predict=no"]) == cli.EXIT_USAGE
    assert "cannot predict" in capsys.readouterr().err
    # Another model than the one that was trained.
    assert cli.main([*command, "--module_config.n_classes=3"]) == 66
    assert "model_params/Dense_0/kernel" in capsys.readouterr().err


def test_a_process_tells_a_mistake_without_a_traceback(tmp_path):
    shown = tekoa("train", "mnits", cwd=tmp_path)
    assert shown.returncode == cli.EXIT_USAGE
    assert shown.stderr.startswith("tekoa: There is no model 'mnits'.")
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_as_a_process(name, tmp_path):
    arguments, words = MISTAKES[name]
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    shown = tekoa(*arguments, cwd=tmp_path)
    assert shown.returncode == cli.EXIT_USAGE
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at the start", "in training"])
def test_control_c_ends_with_a_line(tmp_path, moment):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tekoa", "train", TINY, f"--model_dir={run}"]
    process = subprocess.Popen(
        [*command, "--max_train_steps=100000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    until = time.monotonic() + LIMIT_SECONDS
    while moment == "in training" and not (run / "checkpoint_3").exists():
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    if moment == "at the start":
        # Python itself must have started, or nothing of ours can answer.
        _wait_for_module(process.pid, until)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert "Traceback" not in err, err
    if moment == "in training":
        assert process.returncode == 75, err
        assert "the same command goes on from there" in out
    else:
        assert process.returncode in (75, 130), err


def _wait_for_module(pid, until):
    """Waits until a process has loaded JAX's library: it is in the middle of its imports."""
    while "jaxlib" not in pathlib.Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.slow
def test_a_reader_that_went_away_is_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", TINY, "--model_dir=run"]) == 0
    command = f"{sys.executable} -m tekoa predict {TINY} --model_dir=run --pred_pattern=a"
    shown = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
        text=True,
        capture_output=True,
        check=True,
    )
    assert shown.stdout.split() == [str(cli.EXIT_PIPE)]
    assert not shown.stderr
