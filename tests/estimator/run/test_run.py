import json

import pytest

from tekoa.estimator.cli import flags as flags_lib
from tekoa.estimator.run import run, run_files


def open_run(*flags):
    _, parsed = flags_lib.parse(["--module_imp=mnist", *flags])
    return run.open_run(parsed)


def test_a_run_keeps_its_first_seed(tmp_path):
    current = open_run(f"--model_dir={tmp_path}")
    first = run.choose_seed(current)
    run.start_training(current, first)
    assert run.choose_seed(current) == first
    # A start that may still fail changes nothing.
    assert run.choose_seed(open_run(f"--model_dir={tmp_path}", "--random_seed=5")) == 5
    assert run_files.read_facts(tmp_path)["random_seed"] == first


def test_a_new_start_removes_the_end_mark(tmp_path):
    current = open_run(f"--model_dir={tmp_path}")
    run.start_training(current, 1)
    assert run_files.last_step(tmp_path) is None
    run.end_training(current, 7)
    assert run_files.last_step(tmp_path) == 7
    run.start_training(current, 1)
    assert run_files.last_step(tmp_path) is None


def test_settings_of_the_command_are_recorded(tmp_path):
    current = open_run(f"--model_dir={tmp_path}", "--module_config.warmup=5")
    run.start_training(current, 1)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["warmup"] == 5


def test_the_directory_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_run("--model_dir=./a/../b").model_dir.is_absolute()


def test_a_directory_that_cannot_be_created_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(flags_lib.UsageError, match="cannot be written"):
        run.choose_seed(open_run(f"--model_dir={tmp_path}/file/run"))


def test_the_config_may_come_from_another_file(tmp_path):
    file = tmp_path / "settings.py"
    file.write_text(
        "import ml_collections\n"
        "def get_config():\n"
        "    return ml_collections.ConfigDict({'warmup': 1})\n"
    )
    assert open_run(f"--model_dir={tmp_path}", f"--module_config={file}").settings.warmup == 1


def test_flags_about_the_embedded_data_are_dropped_with_other_data(tmp_path):
    assert open_run().config.valid_pattern == "digits://split=test"
    named = open_run("--train_pattern=idx://x/split=train").config
    assert named.valid_pattern is None
    assert (named.train_batch_size, named.train_epochs) == (32, 9)
