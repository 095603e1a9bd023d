import json

from tekoa.estimator.run import run_files


def test_missing_files_are_empty(tmp_path):
    assert run_files.read_facts(tmp_path) == {}
    assert run_files.last_step(tmp_path) is None


def test_files_are_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"random_seed": 3}))
    (tmp_path / "train_end.json").write_text(json.dumps({"step": 0}))
    assert run_files.read_facts(tmp_path) == {"random_seed": 3}
    assert run_files.last_step(tmp_path) == 0
