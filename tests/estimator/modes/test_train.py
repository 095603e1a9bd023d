import json
import os
import pathlib

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import store
from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.modes import train
from tekoa.extensions import checkpoint_files
from tekoa.store import errors
from tekoa.store.commit import commit, lease, paths
from tekoa.store.read import restore
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")
CHECKED = ["--train_pattern=a", "--max_train_steps=9", "--check_every_steps=3", "--max_ckpt=9"]


def points(directory, tag):
    events = event_accumulator.EventAccumulator(str(directory / "train"), {"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_interrupted_validation_is_repeated_at_the_next_start(tmp_path, capsys):
    flags = [*CHECKED, "--valid_pattern=stopping", "--valid_batch_size=10"]
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main.main(["train", TINY, f"--model_dir={uninterrupted}", *flags]) == 0
    # A few examples are read for their shapes, then 200 at each of steps 0 and 3.
    stopping = "--module_config.stop_at_read=330"
    assert main.main(["train", TINY, f"--model_dir={resumed}", *flags, stopping]) == 75
    assert "Stopped at step 3. Run the same command again to resume." in capsys.readouterr().out
    assert paths.list_steps(resumed) == [0, 3]
    assert [step for step, _ in points(resumed, "train/valid_loss")] == [0]
    assert main.main(["train", TINY, f"--model_dir={resumed}", *flags]) == 0
    for tag in ("train/loss", "train/valid_loss", "train/valid_accuracy"):
        assert points(resumed, tag) == points(uninterrupted, tag)
    for step in paths.list_steps(uninterrupted):
        actual, expected = (store.load(d, step=step) for d in (resumed, uninterrupted))
        assert_trees_equal({**actual, "meta": None}, {**expected, "meta": None})
    assert paths.list_steps(resumed) == paths.list_steps(uninterrupted)


def test_requested_steps_are_profiled(tmp_path):
    flags = [f"--model_dir={tmp_path}", "--profile_steps=2:1"]
    assert main.main(["train", TINY, *flags]) == 0
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.parametrize("text", ["5", "a:b", "0:3", "3:0"])
def test_invalid_profile_steps_are_a_usage_error(tmp_path, capsys, text):
    command = ["train", TINY, f"--model_dir={tmp_path}", f"--profile_steps={text}"]
    assert main.main(command) == ExitCode.USAGE
    assert "FIRST:COUNT" in capsys.readouterr().err


def test_permanent_copies_need_not_coincide_with_checkpoints(tmp_path):
    plain, copied = tmp_path / "plain", tmp_path / "copied"
    assert main.main(["train", TINY, f"--model_dir={plain}", *CHECKED]) == 0
    assert (
        main.main(["train", TINY, f"--model_dir={copied}", *CHECKED, "--save_every_steps=4"]) == 0
    )
    assert paths.list_steps(copied / "save") == [4, 8]
    assert paths.list_steps(copied) == paths.list_steps(plain) == [0, 3, 6, 9]
    assert_trees_equal(store.load(copied)["model_params"], store.load(plain)["model_params"])
    (steps, losses), (plain_steps, plain_losses) = (
        zip(*points(directory, "train/loss"), strict=True) for directory in (copied, plain)
    )
    assert steps == plain_steps
    assert losses == pytest.approx(plain_losses, rel=1e-5)


SUM = """
import importlib.util
import jax.numpy as jnp, optax
from flax import linen as nn
from tekoa.estimator import Experiment
spec = importlib.util.spec_from_file_location("tiny", {tiny!r})
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
DEFAULTS, open_data, get_config = tiny.DEFAULTS, tiny.open_data, tiny.get_config

def loss(logits, batch):
    return {loss}

def experiment(config, data):
    inputs = lambda batch: batch["x"]
    return Experiment(model=nn.Dense(2), loss=loss, optimizer=optax.sgd(0.01), inputs=inputs)
"""
CROSS_ENTROPY = "optax.softmax_cross_entropy_with_integer_labels(logits, batch['y'])"


def test_accumulation_of_a_sum_gives_the_full_batch(tmp_path, capsys):
    model = tmp_path / "sum_model.py"
    model.write_text(SUM.format(tiny=TINY, loss=f"jnp.sum({CROSS_ENTROPY})"))
    curves = []
    for n_parts in (1, 5):
        run = tmp_path / str(n_parts)
        command = ["train", str(model), f"--model_dir={run}", f"--accumulate={n_parts}"]
        assert main.main(command) == 0
        curves.append([value for _, value in points(run, "train/loss")])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    model.write_text(SUM.format(tiny=TINY, loss="jnp.mean(logits @ logits.T)"))
    command = ["train", str(model), f"--model_dir={tmp_path / 'mixed'}", "--accumulate=5"]
    assert main.main(command) == ExitCode.USAGE
    assert "neither a mean nor a sum" in capsys.readouterr().err


def test_fatal_save_is_raised_before_the_next_dispatch(tmp_path, monkeypatch):
    def lose(*_, **__):
        raise errors.FencedError("lost")

    monkeypatch.setattr(commit, "commit", lose)
    keeper = checkpoint_files.CheckpointFileWriter(tmp_path)
    before_dispatch = train._before_dispatch(keeper, None)
    before_dispatch(0)
    keeper._store.save(1, {"x": np.ones(1)})
    keeper._store._saver._thread.join()
    with pytest.raises(errors.FencedError, match="lost"):
        before_dispatch(1)
    keeper.close()


UNTOUCHABLE = """
from tekoa.estimator import Experiment

def get_config():
    return {}

def open_data(config, pattern, train):
    raise AssertionError("the data was opened")

def experiment(config, data):
    raise AssertionError("the model was made")
"""


def test_second_trainer_is_refused_before_data_and_model_are_touched(tmp_path, capsys):
    model, run_dir = tmp_path / "untouchable.py", tmp_path / "run"
    model.write_text(UNTOUCHABLE)
    run_dir.mkdir()
    # The parent of this process is alive and is not this process.
    owner = {**lease.identity(os.getppid()), "token": "another trainer", "count": 0}
    (run_dir / lease.NAME).write_text(json.dumps(owner))
    flags = [f"--model_dir={run_dir}", "--train_pattern=a", "--max_train_steps=3"]
    assert main.main(["train", str(model), *flags]) == ExitCode.IN_USE
    assert f"process {os.getppid()}" in capsys.readouterr().err
    assert [path.name for path in run_dir.iterdir()] == [lease.NAME]


def test_damaged_step_is_quarantined_without_reading_a_step_twice(tmp_path, monkeypatch, capsys):
    command = ["train", TINY, f"--model_dir={tmp_path}", *CHECKED]
    assert main.main(command) == 0
    expected = store.load(tmp_path)["model_params"]
    index_file = paths.step_dir(tmp_path, 9) / paths.INDEX
    index_file.write_bytes(index_file.read_bytes()[:-9])
    restored = []
    restore_step = restore.restore_step

    def count(source, targets, **options):
        restored.append(source.index.step)
        return restore_step(source, targets, **options)

    monkeypatch.setattr(restore, "restore_step", count)
    assert main.main(command) == 0
    assert "Resuming from step 6." in capsys.readouterr().out
    assert restored == [6]
    assert len(list(tmp_path.glob("checkpoint_9.bad-*"))) == 1
    assert_trees_equal(store.load(tmp_path)["model_params"], expected)


def test_resumed_run_reports_changed_settings_and_keeps_every_start(tmp_path, capsys):
    model = tmp_path / "own_tiny.py"
    model.write_text(pathlib.Path(TINY).read_text())
    flags = [f"--model_dir={tmp_path / 'run'}", "--train_pattern=a", "--check_every_steps=3"]
    assert main.main(["train", str(model), *flags, "--max_train_steps=3"]) == 0
    assert "Changed" not in capsys.readouterr().out
    model.write_text(model.read_text() + "\n# Edited.\n")
    changed = ["--max_train_steps=6", "--ema=0.5", "--module_config.can_predict=False"]
    # The moving average is new, so the run cannot be resumed with it.
    assert main.main(["train", str(model), *flags, *changed]) == ExitCode.MISMATCH
    capsys.readouterr()
    changed.remove("--ema=0.5")
    assert main.main(["train", str(model), *flags, *changed]) == 0
    out = capsys.readouterr().out
    assert "Changed at step 3, since the last start:\n" in out
    assert "  can_predict: True -> False\n" in out
    assert "  --max_train_steps: 3 -> 6\n" in out
    assert f"  {model}: own_tiny-" in out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [start["step"] for start in record["starts"]] == [0, 3]
    assert record["starts"][0]["settings"]["can_predict"] is True
    assert record["settings"]["can_predict"] is False
    assert len(list((tmp_path / "run" / "source").iterdir())) == 2


def test_metrics_are_lines_of_json_and_each_step_is_there_once(tmp_path, capsys):
    command = ["train", TINY, f"--model_dir={tmp_path}", "--train_pattern=a"]
    command.append("--check_every_steps=3")
    assert main.main([*command, "--max_train_steps=6"]) == 0
    path = tmp_path / "metrics.jsonl"
    # A start that was killed after step 9, before it was committed.
    path.write_text(path.read_text() + '{"step": 9, "train/loss": 77.0}\n{"step": 12')
    assert main.main([*command, "--max_train_steps=12"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 3, 6, 9, 12]
    assert rows[3]["train/loss"] != 77.0
    path.write_text("hello\nworld\n")
    assert main.main([*command, "--max_train_steps=15"]) == ExitCode.DAMAGED
    assert "is not a JSON object with a 'step'" in capsys.readouterr().err


def test_a_complete_run_sends_what_its_tracker_lacks(tmp_path, capsys):
    command = ["train", TINY, f"--model_dir={tmp_path}", *CHECKED]
    assert main.main(command) == 0
    assert main.main([*command, "--track=csv"]) == 0
    assert "Nothing to do" in capsys.readouterr().out
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "0", "3", "6", "9"]


def test_training_in_float16_logs_its_scale_and_resumes_exactly(tmp_path):
    flags = ["--train_pattern=a", "--check_every_steps=3", "--precision=fp16", "--accumulate=2"]
    for directory, ends in (("whole", [9]), ("parts", [6, 9])):
        for end in ends:
            command = ["train", TINY, f"--model_dir={tmp_path / directory}", *flags]
            assert main.main([*command, f"--max_train_steps={end}"]) == 0
    whole, parts = (store.load(tmp_path / name) for name in ("whole", "parts"))
    assert float(whole["loss_scale"]["scale"]) <= 2.0**15
    assert_trees_equal(whole["model_params"], parts["model_params"])
    assert_trees_equal(whole["loss_scale"], parts["loss_scale"])
    rows = [json.loads(x) for x in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert all("train/loss_scale" in row for row in rows if row["step"])


def test_errors_recommend_flags(tmp_path, capsys):
    model = tmp_path / "nan_model.py"
    model.write_text(SUM.format(tiny=TINY, loss="jnp.mean(logits) * jnp.log(-1.0)"))
    assert main.main(["train", str(model), f"--model_dir={tmp_path / 'a'}"]) == ExitCode.NON_FINITE
    assert "or set --on_nan=skip. `tekoa why RUN` finds" in capsys.readouterr().err
    command = ["train", TINY, f"--model_dir={tmp_path / 'b'}", "--train_pattern=a"]
    assert main.main([*command, "--max_train_steps=3"]) == 0
    changed = ["--max_train_steps=6", "--train_batch_size=20"]
    assert main.main([*command, *changed]) == ExitCode.USAGE
    assert "or set --allow_data_changes to continue" in capsys.readouterr().err


def test_optimizer_by_name_is_stored_and_resumed(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*CHECKED, "--optimizer=auto"]
    assert main.main(["train", TINY, f"--model_dir={whole}", *flags]) == 0
    assert "Optimizer auto (sphere): planned for 9 steps" in capsys.readouterr().out
    record = json.loads((whole / "run.json").read_text())
    assert record["optimizer"] == {"name": "auto", "n_steps": 9, "rule": 6}
    assert record["scales"]
    stop = [*flags, "--valid_pattern=stopping", "--valid_batch_size=10"]
    stop.append("--module_config.stop_at_read=330")
    assert main.main(["train", TINY, f"--model_dir={parts}", *stop]) == 75
    assert main.main(["train", TINY, f"--model_dir={parts}", *flags]) == 0
    for item in ("model_params", "optimizer_state"):
        assert_trees_equal(store.load(parts)[item], store.load(whole)[item])


def test_moving_average_of_a_schedule_free_optimizer_is_a_usage_error(tmp_path, capsys):
    flags = ["--optimizer=schedule_free_sgd", "--ema=0.9"]
    assert main.main(["train", TINY, f"--model_dir={tmp_path}", *flags]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith("tekoa: ema=0.9 cannot be combined with a Schedule-Free optimizer")


def test_unknown_optimizer_is_a_usage_error(tmp_path, capsys):
    command = ["train", TINY, f"--model_dir={tmp_path}", "--optimizer=adamm"]
    assert main.main(command) == ExitCode.USAGE
    assert "--optimizer: There is no optimizer 'adamm'. Did you mean" in capsys.readouterr().err


def test_without_a_directory_the_run_is_named_after_its_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", TINY, "--max_train_steps=1"]) == 0
    assert paths.list_steps(tmp_path / "runs" / "tiny_model") == [0, 1]
    capsys.readouterr()
    assert main.main(["eval", TINY, "--eval_pattern=a"]) == 0
    assert "accuracy at step 1" in capsys.readouterr().out


def test_a_run_that_ends_before_the_requested_step_says_why(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text(pathlib.Path(TINY).read_text() + "\nDEFAULTS['train_epochs'] = 1\n")
    train = ["train", str(model), f"--model_dir={tmp_path / 'run'}"]
    assert main.main([*train, "--max_train_steps=2"]) == 0
    assert "Training ends" not in capsys.readouterr().err
    assert main.main([*train, "--max_train_steps=500"]) == 0
    end = paths.list_steps(tmp_path / "run")[-1]
    line = f"Training ends at step {end}, before --max_train_steps=500: the default of the model is"
    assert f"{line} --train_epochs=1." in capsys.readouterr().err
    assert main.main([*train, "--max_train_steps=500", "--train_epochs=1"]) == 0
    assert "Training ends" not in capsys.readouterr().err


def test_missing_data_is_reported_before_compiling_is_announced(tmp_path, capsys):
    flags = [f"--model_dir={tmp_path}/run", "--train_pattern=no_such_file.npz"]
    assert main.main(["train", "mnist", *flags]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "no_such_file.npz" in error
    assert "Compiling" not in error
