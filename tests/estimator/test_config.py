import pathlib

import pytest

from tekoa.estimator import config


def test_flags_have_the_defaults_of_the_original_runner():
    words, run = config.parse([])
    assert words == []
    assert (run.train_batch_size, run.valid_batch_size) == (64, 64)
    assert (run.eval_batch_size, run.pred_batch_size) == (256, 256)
    assert (run.check_every_steps, run.max_ckpt, run.max_save) == (1000, 10, 3)
    assert run.check_ckpt_every_secs == 60
    assert run.eval_label == "eval"
    assert run.save_high == run.save_low == ()
    assert run.num_valid_examples == -1


def test_words_and_flags_may_mix():
    words, run = config.parse(["train", "--train_batch_size=32", "mnist", "--save_high=a,b"])
    assert words == ["train", "mnist"]
    assert run.train_batch_size == 32
    assert run.save_high == ("a", "b")
    assert run.given == {"train_batch_size", "save_high"}


def test_settings_of_the_model_may_stand_anywhere():
    _, run = config.parse(
        ["--module_config.a.b=1", "--module_config=file.py", "--module_config.c", "x=y"]
    )
    assert run.overrides == {"a.b": "1", "c": "x=y"}
    assert run.module_config == "file.py"


def test_defaults_of_a_model_give_way_to_what_is_given():
    _, run = config.parse(["--train_batch_size=32"])
    run = run.with_defaults({"train_batch_size": 8, "train_epochs": 3})
    assert (run.train_batch_size, run.train_epochs) == (32, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trian_pattern=x"], ["--trian_pattern", "--train_pattern"]),
        (["--max_ckpt=ten"], ["max_ckpt", "ten"]),
        (["--mode=trian"], ["--mode", "eval_wait", "'trian'"]),
        (["--module_config.a"], ["--module_config.a", "VALUE"]),
    ],
)
def test_mistakes_are_named(arguments, words):
    with pytest.raises(config.UsageError) as error:
        config.parse(arguments)
    for word in words:
        assert word in str(error.value)


def test_help_names_every_flag():
    text = config.help_text()
    for name in config.FLAG_NAMES:
        assert f"--{name}" in text


def test_every_flag_is_in_the_page_of_the_command():
    pages = pathlib.Path(__file__).parents[2] / "docs"
    text = (pages / "command.md").read_text()
    assert [name for name in config.FLAG_NAMES if f"`{name}`" not in text] == []


def test_help_of_a_command_has_its_flags_alone():
    shown = config.help_text("predict")
    assert "--pred_pattern" in shown
    assert "--model_dir" in shown
    assert "--train_pattern" not in shown
    assert "--model_dir" not in config.help_text("convert")
    assert "--to " in config.help_text("convert")


@pytest.mark.parametrize("flag", ["--max_ckpt=0", "--ema=2", "--profiler_port=0", "--accumulate=0"])
def test_numbers_out_of_range_are_a_mistake(flag):
    with pytest.raises(config.UsageError, match=flag[2:5]):
        config.parse([flag])
