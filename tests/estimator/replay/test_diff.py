import pathlib
import shutil

import jax.numpy as jnp
import pytest

import tekoa
from tekoa import store
from tekoa.estimator.cli import main
from tekoa.estimator.replay.segment import Replayer, ReplayError
from tekoa.extensions import checkpoint_files

MODEL = pathlib.Path(__file__).parent / "rated_model.py"


def resumed_at_20(train, trained, directory, *flags):
    """Continues a copy of the run from step 20 with other flags."""
    shutil.copytree(trained, directory)
    for step in (30, 40):
        shutil.rmtree(directory / f"checkpoint_{step}")
    assert train(directory, *flags) == 0
    return directory


def test_runs_with_the_same_bits_do_not_part(trained, tmp_path, train, capsys):
    assert train(tmp_path / "again") == 0
    assert main.main(["diff", str(trained), str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    assert "The records agree.\nThe runs have the same bits up to step 40." in out


def test_runs_without_a_common_checkpoint_are_compared_by_training_again(trained, run_copy):
    for step in (0, 20, 40):
        shutil.rmtree(run_copy / f"checkpoint_{step}")
    other = shutil.copytree(trained, run_copy.parent / "other")
    for step in (0, 10, 30):
        shutil.rmtree(other / f"checkpoint_{step}")
    result = tekoa.diff(run_copy, other)
    assert (result.step, result.n_equal, result.n_replays) == (None, 30, 2)
    for step in (10, 30):
        shutil.rmtree(run_copy / f"checkpoint_{step}")
    with pytest.raises(ReplayError, match="run has no complete checkpoint"):
        tekoa.diff(run_copy, other)


def test_an_average_changes_no_step_and_another_model_is_named(trained, tmp_path, train):
    assert train(tmp_path / "run", "--ema=0.9", "--max_train_steps=20") == 0
    result = tekoa.diff(trained, tmp_path / "run")
    assert (result.step, result.n_equal) == (None, 20)
    file = tmp_path / "rated_model.py"
    file.write_text(MODEL.read_text().replace("nn.Dense(2)", 'nn.Dense(2, name="head")'))
    directory = tmp_path / "other"
    assert main.main(["train", str(file), f"--model_dir={directory}", "--max_train_steps=10"]) == 0
    result = tekoa.diff(trained, directory)
    assert (result.step, result.where) == (0, "initial state")
    names = "Dense_1/bias, Dense_1/kernel, head/bias, head/kernel"
    assert result.detail == f"Only one run has {names}."


def test_a_rate_that_was_changed_at_a_resume(trained, tmp_path, train, capsys):
    other = resumed_at_20(train, trained, tmp_path / "run", "--module_config.rate=0.02")
    assert main.main(["diff", str(trained), str(other)]) == 1
    out = capsys.readouterr().out
    assert "They part at step 21, in the update." in out
    assert "rate: 0.01 -> 0.02" in out
    result = tekoa.diff(trained, other)
    assert (result.n_equal, result.step, result.n_replays) == (20, 21, 2)


def test_other_labels_are_found_at_the_first_batch_that_has_one(trained, tmp_path, train):
    other = tmp_path / "run"
    assert train(other, "--module_config.n_bad_rows=3") == 0
    result = tekoa.diff(trained, other)
    # The expected step, from the data alone: the first batch with a row that changed.
    loops = [Replayer(directory).loop_at(0) for directory in (trained, other)]
    step = 1
    while (loops[0].peek_batch()["y"] == loops[1].peek_batch()["y"]).all():
        step += 1
        for loop in loops:
            loop.next_step()
    assert (result.step, result.where) == (step, "batch")
    assert "'batch/y' differs" in result.detail
    assert "n_bad_rows: 0 -> 3" in result.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "step", "where", "cause"),
    [
        (["--random_seed=9"], 0, "initial state", "random seed: 3 -> 9"),
        (["--module_config.rate=0.05"], 1, "update", "rate: 0.01 -> 0.05"),
        (
            ["--train_batch_size=4", "--max_train_steps=40"],
            1,
            "batch",
            "--train_batch_size: 8 -> 4",
        ),
        (["--train_consecutive=4"], 1, "batch", "--train_consecutive: not set -> 4"),
        (["--clip_norm=0.01"], 1, "update", "--clip_norm: not set -> 0.01"),
        (["--unfreeze_at=Dense_0=15"], 1, "update", "--unfreeze_at: not set -> Dense_0=15"),
        (["--optimizer=sgd"], 1, "update", "--optimizer: not set -> sgd"),
        (["--batch_schedule=17:16"], 18, "batch", "--batch_schedule: not set -> 17:16"),
        (["--precision=fp16"], 1, "loss", "--precision: float32 -> fp16"),
        (["--precision=bf16"], 1, "loss", "--precision: float32 -> bf16"),
    ],
)
def test_planted_differences(trained, tmp_path, train, flags, step, where, cause):
    other = tmp_path / "run"
    assert train(other, *flags) == 0
    result = tekoa.diff(trained, other)
    assert (result.step, result.where) == (step, where)
    assert cause in result.cause


@pytest.mark.slow
def test_a_model_file_that_was_changed_at_a_resume(trained, tmp_path, train):
    file, directory = tmp_path / "rated_model.py", tmp_path / "run"
    file.write_text(MODEL.read_text())
    start = ["train", str(file), f"--model_dir={directory}", "--max_train_steps=20"]
    assert main.main(start) == 0
    file.write_text(MODEL.read_text().replace("Dropout(0.1", "Dropout(0.3"))
    assert main.main([*start[:-1], "--max_train_steps=40"]) == 0
    result = tekoa.diff(trained, directory)
    assert (result.step, result.where) == (21, "loss")
    assert "rated_model" in result.cause


@pytest.mark.slow
def test_a_checkpoint_that_was_changed_is_not_what_its_record_produces(run_copy, trained):
    state = Replayer(run_copy).loop_at(30).state
    items = checkpoint_files.items_of(state)
    items["model_params"]["Dense_0"]["bias"] += jnp.float32(1e-3)
    with store.Store(run_copy, keep=[store.KeepLast(99)]) as writable:
        meta = store.load(run_copy, step=30)["meta"]
        writable.save(30, items, meta=meta, replace=True)
    shutil.rmtree(run_copy / "checkpoint_40")
    result = tekoa.diff(trained, run_copy)
    assert (result.step, result.where) == (30, "checkpoint")
    assert f"step 30 of {run_copy} is not what its record produces" in result.cause


def test_another_model_is_named_among_the_settings(trained, run_copy):
    path = run_copy / "run.json"
    path.write_text(path.read_text().replace('"model": "rated_model"', '"model": "other"'))
    assert tekoa.diff(trained, run_copy).settings == ["model: rated_model -> other"]
