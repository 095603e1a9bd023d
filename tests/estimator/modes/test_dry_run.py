import pathlib
import shutil

import pytest

from tekoa.estimator.cli import flags, main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.run import run

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")


def snapshot(directory):
    """Returns times, inodes and contents of all files of a directory."""
    return {
        path.relative_to(directory): (
            path.stat().st_mtime_ns,
            path.stat().st_ino,
            path.read_bytes() if path.is_file() else None,
        )
        for path in [directory, *directory.rglob("*")]
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    assert main.main(["train", TINY, f"--model_dir={directory / 'run'}"]) == 0
    (directory / "run" / "checkpoint_6.tmp-not-ours").mkdir()
    return directory


MODES = {
    "train": ["train", "--valid_pattern=a", "--train_pattern=a"],
    "eval": ["eval", "--eval_pattern=a"],
    "eval_wait": ["eval_wait", "--eval_pattern=a", "--save_high=accuracy"],
    "predict": ["predict", "--pred_pattern=a", "--pred_output=out.txt"],
}


@pytest.mark.parametrize("model_dir", ["run", "new/run"])
@pytest.mark.parametrize("mode", MODES)
def test_dry_run_changes_nothing_on_disk(tiny, monkeypatch, capsys, mode, model_dir):
    monkeypatch.chdir(tiny)
    before = snapshot(tiny)
    command, *options = MODES[mode]
    assert main.main([command, TINY, f"--model_dir={model_dir}", "--dry_run", *options]) == 0
    assert snapshot(tiny) == before
    out = capsys.readouterr().out
    assert "x float32[" in out
    assert "nothing was written" in out
    if mode == "train" or model_dir == "run":
        assert "18 in 4 arrays" in out


def test_damaged_step_is_skipped_and_kept(tiny, tmp_path, monkeypatch, capsys):
    shutil.copytree(tiny / "run", tmp_path / "run")
    (tmp_path / "run" / "checkpoint_6" / "tekoa.json").write_text("{}")
    before = snapshot(tmp_path)
    assert main.main(["train", TINY, f"--model_dir={tmp_path / 'run'}", "--dry_run"]) == 0
    assert snapshot(tmp_path) == before
    assert "Resuming from step 3." in capsys.readouterr().out


def test_unwritable_directory_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    command = ["train", TINY, f"--model_dir={tmp_path}/file/run", "--dry_run"]
    assert main.main(command) == ExitCode.USAGE
    assert "cannot be written" in capsys.readouterr().err


def test_only_a_few_batches_are_read():
    options = ["--module_imp=mnist", "--num_pred_examples=9", "--eval_batch_size=3", "--dry_run"]
    config = run.open_run(flags.parse(options)[1]).config
    assert (config.num_eval_examples, config.num_pred_examples) == (12, 9)
    assert config.num_valid_examples == 4 * config.valid_batch_size


def test_end_of_the_data_is_reported(tmp_path, capsys):
    options = ["--train_batch_size=100", "--train_epochs=1", "--train_pattern=a"]
    assert main.main(["train", TINY, f"--model_dir={tmp_path}", *options, "--dry_run"]) == 0
    assert "The training data ends at step 2" in capsys.readouterr().out
