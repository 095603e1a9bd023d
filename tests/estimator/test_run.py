import json

import pytest

from tekoa.estimator import config, run


def opened(*flags):
    _, parsed = config.parse(["--module_imp=mnist", *flags])
    return run.open_run(parsed)


def test_seed_is_drawn_once_and_kept(tmp_path):
    current = opened(f"--model_dir={tmp_path}")
    first = run.choose_seed(current)
    run.start_training(current, first)
    assert run.choose_seed(current) == first
    # A start that may still be refused changes nothing.
    assert run.choose_seed(opened(f"--model_dir={tmp_path}", "--random_seed=5")) == 5
    assert run.read_facts(tmp_path)["random_seed"] == first


def test_end_mark_is_taken_back_by_a_new_start(tmp_path):
    current = opened(f"--model_dir={tmp_path}")
    run.start_training(current, 1)
    assert run.last_step(tmp_path) is None
    run.end_training(current, 7)
    assert run.last_step(tmp_path) == 7
    run.start_training(current, 1)
    assert run.last_step(tmp_path) is None


def test_settings_are_those_of_the_command(tmp_path):
    current = opened(f"--model_dir={tmp_path}", "--module_config.warmup=5")
    run.start_training(current, 1)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["warmup"] == 5


def test_a_relative_directory_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert opened("--model_dir=./a/../b").model_dir.is_absolute()


def test_a_directory_that_cannot_be_made_is_a_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(config.UsageError, match="cannot be written"):
        run.choose_seed(opened(f"--model_dir={tmp_path}/file/run"))


def test_config_may_come_from_another_file(tmp_path):
    file = tmp_path / "settings.py"
    file.write_text(
        "import ml_collections\n"
        "def get_config():\n"
        "    return ml_collections.ConfigDict({'warmup': 1})\n"
    )
    assert opened(f"--model_dir={tmp_path}", f"--module_config={file}").settings.warmup == 1


def test_flags_of_the_embedded_data_are_left_out_where_data_is_named(tmp_path):
    assert opened().config.valid_pattern == "digits://split=test"
    named = opened("--train_pattern=idx://x/split=train").config
    assert named.valid_pattern is None
    assert (named.train_batch_size, named.train_epochs) == (32, 9)
