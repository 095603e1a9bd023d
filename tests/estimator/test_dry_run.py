import pathlib
import shutil

import pytest

from tekoa.estimator import cli, config, run

TINY = str(pathlib.Path(__file__).parent / "tiny_model.py")


def tree_of(directory):
    """All that can be seen of a directory."""
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
    assert cli.main(["train", TINY, f"--model_dir={directory / 'run'}"]) == 0
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
def test_nothing_changes_on_disk(tiny, monkeypatch, capsys, mode, model_dir):
    monkeypatch.chdir(tiny)
    before = tree_of(tiny)
    word, *flags = MODES[mode]
    assert cli.main([word, TINY, f"--model_dir={model_dir}", "--dry_run", *flags]) == 0
    assert tree_of(tiny) == before
    said = capsys.readouterr().out
    assert "x float32[" in said
    assert "nothing was written" in said
    if mode == "train" or model_dir == "run":
        assert "18 in 4 arrays" in said


def test_a_damaged_step_is_passed_over_and_stays(tiny, tmp_path, monkeypatch, capsys):
    shutil.copytree(tiny / "run", tmp_path / "run")
    (tmp_path / "run" / "checkpoint_6" / "tekoa.json").write_text("{}")
    before = tree_of(tmp_path)
    assert cli.main(["train", TINY, f"--model_dir={tmp_path / 'run'}", "--dry_run"]) == 0
    assert tree_of(tmp_path) == before
    assert "Goes on from step 3." in capsys.readouterr().out


def test_a_directory_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    command = ["train", TINY, f"--model_dir={tmp_path}/file/run", "--dry_run"]
    assert cli.main(command) == cli.EXIT_USAGE
    assert "cannot be written" in capsys.readouterr().err


def test_only_a_handful_of_batches_is_read():
    flags = ["--module_imp=mnist", "--num_pred_examples=9", "--eval_batch_size=3", "--dry_run"]
    short = run.open_run(config.parse(flags)[1]).config
    assert (short.num_eval_examples, short.num_pred_examples) == (12, 9)
    assert short.num_valid_examples == 4 * short.valid_batch_size


def test_data_that_ends_is_told(tmp_path, capsys):
    flags = ["--train_batch_size=100", "--train_epochs=1", "--train_pattern=a"]
    assert cli.main(["train", TINY, f"--model_dir={tmp_path}", *flags, "--dry_run"]) == 0
    assert "The data has ended at step 2" in capsys.readouterr().out
