import pathlib

import pytest

from tekoa.estimator.cli import flags


def test_defaults_equal_those_of_jestimator():
    words, run = flags.parse([])
    assert words == []
    assert (run.train_batch_size, run.valid_batch_size) == (64, 64)
    assert (run.eval_batch_size, run.pred_batch_size) == (256, 256)
    assert (run.check_every_steps, run.max_ckpt, run.max_save) == (1000, 10, 3)
    assert run.check_ckpt_every_secs == 60
    assert run.eval_label == "eval"
    assert run.save_high == run.save_low == ()
    assert run.num_valid_examples == -1


def test_words_and_flags_can_be_mixed():
    words, run = flags.parse(["train", "--train_batch_size=32", "mnist", "--save_high=a,b"])
    assert words == ["train", "mnist"]
    assert run.train_batch_size == 32
    assert run.save_high == ("a", "b")
    assert run.set_flags == {"train_batch_size", "save_high"}


def test_model_settings_can_appear_anywhere():
    _, run = flags.parse(
        ["--module_config.a.b=1", "--module_config=file.py", "--module_config.c", "x=y"]
    )
    assert run.overrides == {"a.b": "1", "c": "x=y"}
    assert run.module_config == "file.py"


def test_flags_on_the_command_line_override_the_models_defaults():
    _, run = flags.parse(["--train_batch_size=32"])
    run = run.with_defaults({"train_batch_size": 8, "train_epochs": 3})
    assert (run.train_batch_size, run.train_epochs) == (32, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trian_pattern=x"], ["--trian_pattern", "--train_pattern"]),
        (["--max_ckpt=ten"], ["max_ckpt", "ten"]),
        (["--mode=trian"], ["--mode", "eval_wait", "'trian'"]),
        (["--module_config.a"], ["--module_config.a", "VALUE"]),
        (["--" + "a" * 5000], ["Unknown flag --aaa", "5002 characters"]),
    ],
)
def test_usage_errors_name_the_flag_and_the_value(arguments, words):
    with pytest.raises(flags.UsageError) as error:
        flags.parse(arguments)
    for word in words:
        assert word in str(error.value)


def test_flags_of_other_tools_are_translated():
    for name, flag in flags._ELSEWHERE.items():
        with pytest.raises(flags.UsageError, match=f"Did you mean '--{flag}'"):
            flags.parse([f"--{name}=1"])
        assert flag.removeprefix("no") in flags.FLAG_NAMES


def test_help_lists_every_flag():
    text = flags.help_text()
    for name in flags.FLAG_NAMES:
        assert f"--{name}" in text


def test_every_flag_is_documented():
    pages = pathlib.Path(__file__).parents[3] / "docs"
    text = (pages / "command.md").read_text()
    assert [name for name in flags.FLAG_NAMES if f"`{name}`" not in text] == []


def test_help_of_a_command_lists_only_its_flags():
    text = flags.help_text("predict")
    assert "--pred_pattern" in text
    assert "--model_dir" in text
    assert "--train_pattern" not in text
    assert "--model_dir" not in flags.help_text("convert")
    assert "--to " in flags.help_text("convert")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max_ckpt=0", "--max_ckpt must be an integer of at least 1, got '0'."),
        ("--max_ckpt=many", "--max_ckpt must be an integer of at least 1, got 'many'."),
        ("--clip_norm=nan", "--clip_norm must be a number, got nan."),
        ("--ema=2", "--ema must be a number from 0 to 1, got '2'."),
        ("--profiler_port=0", "--profiler_port must be an integer from 1 to 65535, got '0'."),
        ("--progress=maybe", "--progress must be true or false, got 'maybe'."),
    ],
)
def test_invalid_values_are_usage_errors(flag, message):
    with pytest.raises(flags.UsageError) as error:
        flags.parse([flag])
    assert str(error.value) == message


def test_old_name_of_the_native_format_is_accepted():
    assert flags.parse(["--to=tekoa"])[1].to == "native"
