import pathlib

import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import store
from tekoa.estimator import cli
from tekoa.store import names
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parent / "tiny_model.py")
CHECKED = ["--train_pattern=a", "--max_train_steps=9", "--check_every_steps=3", "--max_ckpt=9"]


def points(directory, tag):
    events = event_accumulator.EventAccumulator(str(directory / "train"), {"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_a_validation_given_up_for_a_signal_is_made_up_for(tmp_path, capsys):
    flags = [*CHECKED, "--valid_pattern=stopping", "--valid_batch_size=10"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli.main(["train", TINY, f"--model_dir={whole}", *flags]) == 0
    # Some examples are read for their form, then 200 are read at steps 0 and 3 each.
    stopping = "--module_config.stop_at_read=330"
    assert cli.main(["train", TINY, f"--model_dir={parts}", *flags, stopping]) == 75
    assert "Stopped at step 3;" in capsys.readouterr().out
    assert names.list_steps(parts) == [0, 3]
    assert [step for step, _ in points(parts, "train/valid_loss")] == [0]
    assert cli.main(["train", TINY, f"--model_dir={parts}", *flags]) == 0
    for tag in ("train/loss", "train/valid_loss", "train/valid_accuracy"):
        assert points(parts, tag) == points(whole, tag)
    for step in names.list_steps(whole):
        ours, theirs = store.load(parts, step=step), store.load(whole, step=step)
        assert_trees_equal({**ours, "meta": None}, {**theirs, "meta": None})
    assert names.list_steps(parts) == names.list_steps(whole)


def test_chosen_steps_are_traced(tmp_path):
    flags = [f"--model_dir={tmp_path}", "--profile_steps=2:1"]
    assert cli.main(["train", TINY, *flags]) == 0
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.parametrize("text", ["5", "a:b", "0:3", "3:0"])
def test_steps_to_trace_are_checked(tmp_path, capsys, text):
    command = ["train", TINY, f"--model_dir={tmp_path}", f"--profile_steps={text}"]
    assert cli.main(command) == cli.EXIT_USAGE
    assert "FIRST:COUNT" in capsys.readouterr().err


def test_copies_are_kept_at_steps_that_are_no_checks(tmp_path):
    plain, copied = tmp_path / "plain", tmp_path / "copied"
    assert cli.main(["train", TINY, f"--model_dir={plain}", *CHECKED]) == 0
    assert cli.main(["train", TINY, f"--model_dir={copied}", *CHECKED, "--save_every_steps=4"]) == 0
    assert names.list_steps(copied / "save") == [4, 8]
    assert names.list_steps(copied) == names.list_steps(plain) == [0, 3, 6, 9]
    assert_trees_equal(store.load(copied)["model_params"], store.load(plain)["model_params"])
    (steps, ours), (same, theirs) = (
        zip(*points(directory, "train/loss"), strict=True) for directory in (copied, plain)
    )
    assert steps == same
    assert ours == pytest.approx(theirs, rel=1e-5)
