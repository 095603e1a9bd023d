import json
import pathlib
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import data, store
from tekoa.estimator import cli, config, modes
from tekoa.models import mnist
from tekoa.store import names
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parent / "tiny_model.py")


@pytest.mark.parametrize(
    ("flags", "has_steps", "mode"),
    [
        (["--train_pattern=a"], False, "train"),
        (["--train_pattern=a", "--eval_pattern=b"], True, "eval_wait"),
        (["--eval_pattern=b"], False, "eval_wait"),
        (["--eval_pattern=b"], True, "eval_once"),
        (["--pred_pattern=c"], True, "predict"),
        (["--pred_pattern=c", "--mode=train"], True, "train"),
    ],
)
def test_mode_follows_from_the_flags(tmp_path, flags, has_steps, mode):
    if has_steps:
        (tmp_path / "checkpoint_0").mkdir()
    _, run = config.parse([f"--model_dir={tmp_path}", *flags])
    assert modes.choose_mode(run) == mode


@pytest.mark.parametrize(
    "flags",
    [[], ["--eval_pattern=a", "--pred_pattern=b"], ["--train_pattern=a", "--pred_pattern=b"]],
    ids=str,
)
def test_flags_that_do_not_tell_are_a_mistake(flags):
    _, run = config.parse(flags)
    with pytest.raises(config.UsageError):
        modes.choose_mode(run)


def test_training_leaves_what_the_spec_says(trained):
    assert names.list_steps(trained) == [0, 10, 20, 25]
    assert names.list_steps(trained / "save") == [20]
    assert json.loads((trained / "train_end.json").read_text()) == {"step": 25}
    facts = json.loads((trained / "run.json").read_text())
    assert facts["random_seed"] == 3
    assert facts["settings"] == {"warmup": 500, "amos_beta": 0.98}
    assert facts["n_steps"] == 25
    assert facts["scales"]["Dense_1/kernel"] == pytest.approx(256**-0.5)


def test_tensorboard_has_losses_validation_and_parameter_scales(trained):
    events = event_accumulator.EventAccumulator(str(trained / "train"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/valid_loss", "train/valid_test_accuracy"} <= set(tags)
    assert "params/Dense_1/kernel (256, 10)" in tags
    assert [point.step for point in events.Scalars("train/loss")] == [10, 20, 25]


def predictions(trained, capsys, *flags):
    code = cli.main(
        [
            "predict",
            "mnist",
            f"--model_dir={trained}",
            "--pred_pattern=digits://split=test",
            *flags,
        ]
    )
    assert code == 0
    return np.array([int(line) for line in capsys.readouterr().out.split()])


def test_predictions_are_those_of_a_forward_pass_in_order(trained, capsys):
    seen = predictions(trained, capsys, "--pred_batch_size=100")
    source = data.load("digits://split=test")
    batch = next(source.batches(len(source), epochs=1))
    params = store.load(trained)["model_params"]
    model = mnist.CNN(10, source.info.value_range)
    logits = model.apply({"params": params}, batch["image"])
    np.testing.assert_array_equal(seen, np.argmax(logits, -1))


def test_eval_once_equals_numpy_on_the_same_predictions(trained, capsys):
    seen = predictions(trained, capsys)
    labels = np.array([example["label"] for example in data.load("digits://split=test")])
    code = cli.main(
        [
            "eval",
            "mnist",
            f"--model_dir={trained}",
            "--eval_pattern=digits://split=test",
            "--eval_batch_size=77",
            "--json",
        ]
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 25
    np.testing.assert_allclose(found["test_accuracy"], np.mean(seen == labels), rtol=1e-6)


def test_predictions_go_to_a_file_that_appears_whole(trained, tmp_path, capsys):
    expected = predictions(trained, capsys)
    path = tmp_path / "out.txt"
    assert predictions(trained, capsys, f"--pred_output={path}").size == 0
    np.testing.assert_array_equal(np.loadtxt(path, dtype=int), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_training_goes_on_from_a_best_checkpoint_in_place(trained, tmp_path):
    shutil.copytree(trained / "save" / "checkpoint_20", tmp_path / "checkpoint_20")
    code = cli.main(
        [
            "train",
            "mnist",
            f"--model_dir={tmp_path}",
            "--train_batch_size=64",
            "--max_train_steps=25",
            "--check_every_steps=10",
            "--random_seed=3",
            "--noprogress",
            "--steps_per_dispatch=1",
        ]
    )
    assert code == 0
    ours, theirs = store.load(tmp_path), store.load(trained)
    for name, value in theirs["model_params"]["Dense_0"].items():
        np.testing.assert_array_equal(ours["model_params"]["Dense_0"][name], value)


def test_scales_are_shown_for_every_parameter(capsys):
    assert cli.main(["scales", "mnist"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    names_shown = [row.split()[0] for row in rows]
    expected = [
        f"{a}/{b}" for a in ["Conv_0", "Conv_1", "Dense_0", "Dense_1"] for b in ["bias", "kernel"]
    ]
    assert names_shown[: len(expected)] == expected


def test_a_run_that_has_gone_further_is_left_as_it_is(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    flags = ["--train_batch_size=64", "--max_train_steps=12", "--random_seed=3", "--noprogress"]
    assert cli.main(["train", "mnist", f"--model_dir={tmp_path / 'run'}", *flags]) == 0
    assert "Nothing is left to train: 25 steps are done" in capsys.readouterr().out
    assert names.list_steps(tmp_path / "run") == [0, 10, 20, 25]


def test_a_run_in_t5x_format_resumes_and_evaluates_as_a_native_one(tmp_path, capsys):
    found = {}
    for layout in ("native", "t5x"):
        flags = [f"--model_dir={tmp_path / layout}", f"--checkpoint_format={layout}", "--ema=0.5"]
        assert cli.main(["train", TINY, *flags, "--max_train_steps=3"]) == 0
        assert cli.main(["train", TINY, *flags, "--max_train_steps=6"]) == 0
        assert "Goes on from step 3." in capsys.readouterr().out
        assert cli.main(["eval", TINY, *flags[:1], "--eval_pattern=a", "--json"]) == 0
        found[layout] = store.load(tmp_path / layout), capsys.readouterr().out
    assert_trees_equal(found["native"], found["t5x"])
    raw = store.t5x.read(tmp_path / "t5x", step=6)
    assert_trees_equal(raw["target"], found["native"][0]["model_params"])
    assert int(raw["state"]["step"]) == 6
