import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

import pytest

from tekoa.data import fingerprint
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.replay import record
from tekoa.estimator.run import run as runs


def test_the_start_of_a_step_is_the_last_one_that_began_before_it(tmp_path):
    starts = [
        record.Start(directory=tmp_path, step=step, facts={"n": n})
        for n, step in enumerate([0, 30, 20])
    ]
    history = record.RunRecord(directory=tmp_path, starts=tuple(starts))
    made_by = {step: history.start_of(step).facts["n"] for step in (0, 1, 20, 21, 30, 31, 40)}
    assert made_by == {0: 0, 1: 0, 20: 0, 21: 2, 30: 2, 31: 2, 40: 2}
    assert history.changes_between(0, 40) == [20]
    assert history.changes_between(20, 40) == []


def test_the_flags_of_a_start_are_those_that_trained(trained):
    start = record.read_record(trained).start_of(40)
    config = runs.open_run(start.config()).config
    assert (config.train_batch_size, config.max_train_steps) == (8, 40)
    assert config.model_dir == str(trained)
    assert start.seed == 3
    assert start.differences() == []


def test_a_model_file_that_has_changed_is_replaced_by_its_copy(tmp_path):
    file, directory = tmp_path / "own_model.py", tmp_path / "run"
    shutil.copy(pathlib.Path(__file__).parent / "rated_model.py", file)
    from tekoa.estimator.cli import main

    assert main.main(["train", str(file), f"--model_dir={directory}", "--max_train_steps=2"]) == 0
    assert record.read_record(directory).starts[0].config().module_imp == str(file)
    file.write_text(file.read_text() + "\n# Changed.\n")
    start = record.read_record(directory).starts[0]
    copy = start.config().module_imp
    assert copy is not None
    assert pathlib.Path(copy).parent == directory / "source"
    assert len(start.differences()) == 1
    assert "own_model.py has changed" in start.differences()[0]
    pathlib.Path(copy).unlink()
    with pytest.raises(UsageError, match=r"its copy .* is missing"):
        start.config()


def test_other_packages_and_devices_are_reported(trained):
    start = record.read_record(trained).starts[0]
    facts = {**start.facts, "versions": {"jax": "0.1"}, "devices": {"kind": "TPU", "count": 4}}
    old = record.Start(directory=trained, step=0, facts=facts)
    (line,) = old.differences()
    assert line.startswith("jax was 0.1, is ")
    (line,) = old.machine_differences()
    assert "TPU" in line


def test_data_that_has_changed_is_reported(trained, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("x,y\n1,2\n")
    start = record.read_record(trained).starts[0]
    facts = {
        **start.facts,
        "flags": {**start.facts["flags"], "train_pattern": str(file)},
        "data": {"--train_pattern": fingerprint.fingerprint(str(file))},
    }
    start = record.Start(directory=trained, step=0, facts=facts)
    assert start.machine_differences() == []
    file.write_text("x,y\n1,3\n")
    (line,) = start.machine_differences()
    assert f"The data in {file} was 1 file of 8 bytes, digest " in line
    file.unlink()
    (line,) = start.machine_differences()
    assert line.endswith(", is gone.")


def test_a_directory_without_a_record_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not the directory of a run"):
        record.read_record(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tekoa\.replay\(directory, make_loop\)"):
        record.read_record(tmp_path)


def test_the_record_of_a_rolled_back_run_is_complete_for_every_start(train, tmp_path):
    directory = tmp_path / "run"
    assert train(directory, "--max_train_steps=10") == 0
    assert train(directory, "--max_train_steps=20", "--module_config.rate=0.5") == 0
    first, second = record.read_record(directory).starts
    assert (first.facts["settings"]["rate"], second.facts["settings"]["rate"]) == (0.01, 0.5)
    assert second.facts["random_seed"] == 3
    assert second.step == 10


def test_packages_that_are_not_loaded_yet_are_not_missing(run_copy):
    """`equinox` is loaded by the model file, if at all."""
    program = (
        "import sys; from tekoa.estimator.replay import record;"
        f"start = record.read_record({str(run_copy)!r}).starts[0];"
        "start.facts['versions']['equinox'] = '0.0.1';"
        "print(start.differences(), 'equinox' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"equinox was 0.0.1, is {importlib.metadata.version('equinox')}." in result.stdout
    assert "False" in result.stdout
