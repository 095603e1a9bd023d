import pytest

from tekoa.estimator.cli import flags

YAML = """
train_batch_size: 16
learning_rate: 1e-3
save_high: [a, b]
progress: false
valid_pattern: null
module_config:
  width: 8
  opt: {warmup: 10, sizes: [3, 4]}
"""
TOML = """
train_batch_size = 16
learning_rate = 1e-3
save_high = ["a", "b"]
progress = false
[module_config]
width = 8
opt = {warmup = 10, sizes = [3, 4]}
"""
FLAGS = """
# A comment.
--train_batch_size=16
--learning_rate=1e-3
--save_high=a,b
--noprogress
--module_config.width=8
--module_config.opt.warmup=10
--module_config.opt.sizes=3,4
"""


@pytest.mark.parametrize(
    ("name", "text", "flag"),
    [
        ("a.yaml", YAML, "--config"),
        ("a.toml", TOML, "--config"),
        ("a.txt", FLAGS, "--flagfile"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_flags_of_a_file_are_read_and_the_command_line_wins(
    name, text, flag, is_first, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    own = ["--train_batch_size=8", "--module_config.width=9"]
    arguments = [flag, name, *own] if is_first else [*own, f"{flag}={name}"]
    words, config = flags.parse(["train", "mnist", *arguments])
    assert words == ["train", "mnist"]
    assert config.train_batch_size == 8
    assert config.learning_rate == 1e-3
    assert config.save_high == ("a", "b")
    assert config.progress is False
    assert config.valid_pattern is None
    assert config.overrides == {"width": "9", "opt.warmup": "10", "opt.sizes": "3,4"}
    assert config.set_flags == {"train_batch_size", "learning_rate", "save_high", "progress"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "trian_pattern: x", "a.yaml: 'trian_pattern' is not a flag. Did you mean 'tra"),
        ("a.toml", "max_ckpts = 3", "a.toml: 'max_ckpts' is not a flag. Did you mean 'max_ckpt'"),
        ("a.yaml", "- a\n- b", "must contain flags as `name: value`"),
        ("a.yaml", "ema: {a: 1}", "'ema' must be a single value"),
        ("a.yaml", "ema: 2024-01-01", "'ema' must be a text, a number or a list"),
        ("a.yaml", "max_ckpt: ten", "--max_ckpt must be an integer of at least 1, got 'ten'."),
        ("a.yaml", "ema: 0.1\nema: 0.2", "ema is there twice"),
        ("a.yaml", "a: [", "cannot be read: while parsing"),
        ("a.toml", "a = ", "cannot be read: Invalid value"),
        ("a.json", "{}", "must be a file with the ending .yaml, .yml or .toml"),
    ],
)
def test_mistakes_in_a_file_are_usage_errors(name, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(flags.UsageError) as error:
        flags.parse(["train", f"--config={name}"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config=no.yaml", "--config=no.yaml cannot be read: No such file"),
        ("--flagfile=no.txt", "--flagfile=no.txt does not exist"),
        ("--config", "--config needs a file"),
    ],
)
def test_a_missing_file_is_a_usage_error(flag, message):
    with pytest.raises(flags.UsageError) as error:
        flags.parse([flag])
    assert message in str(error.value)
