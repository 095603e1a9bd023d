import json
import pathlib
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import data, store
from tekoa.estimator.cli import main
from tekoa.models import mnist
from tekoa.store.commit import paths
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")


def test_training_writes_the_specified_files(trained):
    assert paths.list_steps(trained) == [0, 10, 20, 25]
    assert paths.list_steps(trained / "save") == [20]
    assert json.loads((trained / "train_end.json").read_text()) == {"step": 25}
    facts = json.loads((trained / "run.json").read_text())
    assert facts["random_seed"] == 3
    assert facts["settings"] == {"optimizer": "auto", "warmup": None, "amos_beta": None}
    assert facts["n_steps"] == 25
    assert facts["scales"]["Dense_1/kernel"] == pytest.approx((2 / 256) ** 0.5)


def test_tensorboard_shows_loss_validation_and_parameter_scales(trained):
    events = event_accumulator.EventAccumulator(str(trained / "train"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/valid_loss", "train/valid_test_accuracy"} <= set(tags)
    assert "params/Dense_1/kernel (256, 10)" in tags
    assert [point.step for point in events.Scalars("train/loss")] == [10, 20, 25]


def predictions(trained, capsys, *flags):
    command = ["predict", "mnist", f"--model_dir={trained}"]
    assert main.main([*command, "--pred_pattern=digits://split=test", *flags]) == 0
    return np.array([int(line) for line in capsys.readouterr().out.split()])


def test_predictions_equal_a_forward_pass_in_order(trained, capsys):
    predicted = predictions(trained, capsys, "--pred_batch_size=100")
    source = data.load("digits://split=test")
    batch = next(source.batches(len(source), epochs=1))
    params = store.load(trained)["model_params"]
    model = mnist.CNN(10, source.info.value_range)
    logits = model.apply({"params": params}, batch["image"])
    np.testing.assert_array_equal(predicted, np.argmax(logits, -1))


def test_eval_equals_numpy_on_the_same_predictions(trained, capsys):
    predicted = predictions(trained, capsys)
    labels = np.array([example["label"] for example in data.load("digits://split=test")])
    command = ["eval", "mnist", f"--model_dir={trained}", "--eval_pattern=digits://split=test"]
    assert main.main([*command, "--eval_batch_size=77", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["step"] == 25
    np.testing.assert_allclose(metrics["test_accuracy"], np.mean(predicted == labels), rtol=1e-6)


def test_predictions_file_appears_only_when_complete(trained, tmp_path, capsys):
    expected = predictions(trained, capsys)
    path = tmp_path / "out.txt"
    assert predictions(trained, capsys, f"--pred_output={path}").size == 0
    np.testing.assert_array_equal(np.loadtxt(path, dtype=int), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_training_resumes_from_a_copied_checkpoint(trained, tmp_path):
    shutil.copytree(trained / "save" / "checkpoint_20", tmp_path / "checkpoint_20")
    code = main.main(
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


def test_scales_lists_every_parameter(capsys):
    assert main.main(["scales", "mnist"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    names = [row.split()[0] for row in rows]
    expected = [
        f"{a}/{b}" for a in ["Conv_0", "Conv_1", "Dense_0", "Dense_1"] for b in ["bias", "kernel"]
    ]
    assert names[: len(expected)] == expected


def test_scales_of_a_model_file_with_its_own_step(capsys):
    assert main.main(["scales", "linear_regression", "--train_batch_size=20"]) == 0
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()}
    assert set(rows) == {"name", "linear/bias", "linear/kernel"}
    # A sum over 10 inputs of about unit rms has unit rms.
    assert rows["linear/kernel"][:2] == ["(10,", "5)"]
    assert float(rows["linear/kernel"][2]) == pytest.approx(10**-0.5, rel=0.15)
    assert rows["linear/bias"][1] == "0.5"


def test_run_with_more_steps_is_left_unchanged(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    flags = ["--train_batch_size=64", "--max_train_steps=12", "--random_seed=3", "--noprogress"]
    assert main.main(["train", "mnist", f"--model_dir={tmp_path / 'run'}", *flags]) == 0
    assert "Nothing to do: all 25 steps are complete." in capsys.readouterr().out
    assert paths.list_steps(tmp_path / "run") == [0, 10, 20, 25]


def test_t5x_run_resumes_and_evaluates_like_a_native_run(tmp_path, capsys):
    results = {}
    for name in ("native", "t5x"):
        flags = [f"--model_dir={tmp_path / name}", f"--checkpoint_format={name}", "--ema=0.5"]
        assert main.main(["train", TINY, *flags, "--max_train_steps=3"]) == 0
        assert main.main(["train", TINY, *flags, "--max_train_steps=6"]) == 0
        assert "Resuming from step 3." in capsys.readouterr().out
        assert main.main(["eval", TINY, *flags[:1], "--eval_pattern=a", "--json"]) == 0
        results[name] = store.load(tmp_path / name), capsys.readouterr().out
    assert_trees_equal(results["native"], results["t5x"])
    raw = store.t5x.read(tmp_path / "t5x", step=6)
    assert_trees_equal(raw["target"], results["native"][0]["model_params"])
    assert int(raw["state"]["step"]) == 6


def test_evaluation_uses_the_settings_of_the_run_unless_they_are_set(tmp_path, capsys):
    model = pathlib.Path(__file__).parents[1] / "tiny_model.py"
    train = [f"--model_dir={tmp_path}/run", "--module_config.n_classes=4"]
    assert main.main(["train", str(model), *train]) == 0
    evaluate = ["eval", str(model), "--eval_pattern=rows"]
    capsys.readouterr()
    step = f"--checkpoint_path={tmp_path}/run/checkpoint_3"
    for place in ([f"--model_dir={tmp_path}/run"], [f"--model_dir={tmp_path}/other", step]):
        assert main.main([*evaluate, *place]) == 0
        printed = capsys.readouterr()
        assert "accuracy at step" in printed.out
        assert printed.err == "Using the settings of the run: n_classes=4.\n"
    other = [f"--model_dir={tmp_path}/run", "--module_config.n_classes=3"]
    assert main.main([*evaluate, *other]) == 66
    assert "Using the settings" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "kind"), [("eval", "eval"), ("eval_wait", "eval"), ("predict", "pred")]
)
def test_a_stop_signal_ends_evaluation_and_prediction_with_code_75(tmp_path, mode, kind):
    assert main.main(["train", TINY, f"--model_dir={tmp_path}", "--max_train_steps=1"]) == 0
    flags = [f"--{kind}_pattern=stopping", f"--{kind}_batch_size=10"]
    command = [mode, TINY, f"--model_dir={tmp_path}", *flags]
    assert main.main([*command, "--module_config.stop_at_read=60"]) == 75
    assert main.main(command) == 0


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["train", "--save_high=accuracy", "--eval_pattern=a"], "--eval_pattern"),
        (["train", "--pred_batch_size=5"], "--pred_batch_size"),
        (["eval", "--train_epochs=3"], "--train_epochs"),
        (["eval", "--accumulate=2"], "--accumulate"),
        (["eval", "--save_low=loss"], "--save_low"),
        (["eval_wait", "--pred_output=a"], "--pred_output"),
        (["predict", "--save_high=accuracy"], "--save_high"),
        (["predict", "--max_train_steps=3"], "--max_train_steps"),
    ],
)
def test_a_flag_that_a_mode_does_not_use_is_refused(tmp_path, capsys, words, unused):
    mode, *flags = words
    assert main.main([mode, TINY, f"--model_dir={tmp_path}/run", *flags]) == 2
    assert f"tekoa {mode} does not use {unused}." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_folders_of_images_are_numbered_as_in_training(tmp_path, capsys):
    image_lib = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    for i, folder in enumerate(["train/a", "train/b", "train/c", "test/c", "test/c", "test/b"]):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        image_lib.fromarray(pixels[i]).save(tmp_path / folder / f"{i}.png")
    command = ["mnist", f"--model_dir={tmp_path}/run"]
    patterns = [f"--train_pattern={tmp_path}/train", f"--valid_pattern={tmp_path}/test"]
    flags = [*patterns, "--train_batch_size=3"]
    assert main.main(["train", *command, *flags, "--max_train_steps=1"]) == 0
    capsys.readouterr()
    # The files of one folder have no label; those of another directory have other classes.
    assert main.main(["predict", *command, f"--pred_pattern={tmp_path}/test/c/*.png"]) == 0
    assert main.main(["predict", *command, f"--pred_pattern={tmp_path}/test"]) == 0
    of_c, of_all = np.split(np.array(capsys.readouterr().out.split(), int), [2])
    np.testing.assert_array_equal(of_all[1:], of_c)
    # Without --eval_pattern: the validation data of the run, not the digits of the model.
    assert main.main(["eval", *command, "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["test_accuracy"]
    assert accuracy == pytest.approx(np.mean(of_all == [1, 2, 2]))
