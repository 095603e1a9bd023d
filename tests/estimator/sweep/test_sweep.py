"""`tekoa sweep`, end to end."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

import tekoa
from tekoa.estimator.cli import main
from tekoa.store.commit import paths

MODEL = str(pathlib.Path(__file__).parent / "swept_model.py")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over rates, one of which meets NaN, with another width beside it."""
    directory = tmp_path_factory.mktemp("sweep")
    grid = ["--grid", "module_config.rate=0.01,0.1", "--grid=module_config.limit=0,3"]
    assert main.main(["sweep", MODEL, *grid, f"--model_dir={directory}"]) == 0
    return directory


def test_lane_is_the_run_of_train_to_the_bit(swept, tmp_path):
    flags = ["--module_config.rate=0.1", "--random_seed=0", "--noprogress"]
    assert main.main(["train", MODEL, *flags, f"--model_dir={tmp_path}/run"]) == 0
    difference = tekoa.diff(tmp_path / "run", swept / "rate=0.1,limit=0")
    assert (difference.step, difference.n_equal) == (None, 16)
    assert tekoa.verify(swept / "rate=0.01,limit=0", fraction=1.0).is_good


def test_lane_with_nan_is_stopped_and_the_others_go_on(swept):
    stopped = json.loads((swept / "sweep.json").read_text())["stopped"]
    assert set(stopped) == {"rate=0.01,limit=3", "rate=0.1,limit=3"}
    assert "NaN or Inf at step" in stopped["rate=0.1,limit=3"]
    last = paths.list_steps(swept / "rate=0.1,limit=3")[-1]
    assert stopped["rate=0.1,limit=3"].endswith(f"step {last + 1}")
    assert paths.list_steps(swept / "rate=0.1,limit=0")[-1] == 16


def test_table_picture_and_best_run_are_shown(swept, capsys):
    before = sorted(swept.rglob("checkpoint_*"))
    grid = ["--grid", "module_config.rate=0.01,0.1", "--grid=module_config.limit=0,3"]
    assert main.main(["sweep", MODEL, *grid, f"--model_dir={swept}"]) == 0
    out, _ = capsys.readouterr()
    assert f"The best run is {swept}/rate=0.1,limit=0: loss" in out
    assert out.count("NaN or Inf at step") == 2
    assert (swept / "sweep.svg").read_text().startswith("<svg")
    assert sorted(swept.rglob("checkpoint_*")) == before


def test_the_command_for_the_best_run_has_the_settings_of_the_sweep(tmp_path, capsys):
    flags = ["--optimizer=sgd", "--module_config.limit=0", "--max_train_steps=2"]
    grid = ["--grid=learning_rate=0.01,0.02", f"--model_dir={tmp_path}"]
    assert main.main(["sweep", MODEL, *flags, *grid]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    command = last.partition(": tekoa ")[2].split()
    chosen = ["--module_config.limit=0", "--optimizer=sgd"]
    assert command[:4] == ["train", MODEL, *chosen]
    assert main.main([*command, "--max_train_steps=3", "--noprogress"]) == 0


def test_lane_goes_on_by_itself(swept, tmp_path, capsys):
    flags = ["--module_config.rate=0.01", "--max_train_steps=18", "--noprogress"]
    directory = shutil.copytree(swept / "rate=0.01,limit=0", tmp_path / "lane")
    assert main.main(["train", MODEL, *flags, f"--model_dir={directory}"]) == 0
    assert "Resuming from step 16." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", MODEL], "Nothing to sweep"),
        (["sweep", MODEL, "--grid=rte=1,2"], "cannot sweep 'rte'"),
        (["sweep", MODEL, "--grid=module_config.rte=1,2"], "no setting 'rte'"),
        (["sweep", MODEL, "--seeds=2", "--mesh=data=2"], "one device"),
        (["sweep", MODEL, "--seeds=2", "--pred_pattern=x"], "does not use --pred_pattern"),
        (["sweep", "no_such_model", "--seeds=2"], "no_such_model"),
        (["sweep", MODEL, "--seeds=two"], "--seeds"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path):
    assert main.main([*arguments, f"--model_dir={tmp_path}/new"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_sweep_resumes_to_the_bit(number, tmp_path):
    def command(directory):
        words = ["sweep", MODEL, "--grid=module_config.rate=0.01,0.1", "--seeds=2", "--halving"]
        words += ["--max_train_steps=400", f"--model_dir={directory}"]
        return [sys.executable, "-m", "tekoa.estimator", *words]

    subprocess.run(command(tmp_path / "whole"), check=True)
    killed = subprocess.Popen(command(tmp_path / "killed"))
    while len(list((tmp_path / "killed").glob("*/checkpoint_40"))) < 2 and killed.poll() is None:
        time.sleep(0.01)
    os.kill(killed.pid, number)
    killed.wait()
    assert killed.returncode != 0
    subprocess.run(command(tmp_path / "killed"), check=True)
    lanes = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_dir())
    assert len(lanes) == 4
    for lane in lanes:
        a, b = tmp_path / "whole" / lane, tmp_path / "killed" / lane
        assert paths.list_steps(a)[-1] == paths.list_steps(b)[-1]
        assert tekoa.diff(a, b).step is None
    records = [json.loads((tmp_path / d / "sweep.json").read_text()) for d in ("whole", "killed")]
    assert records[0] == records[1]
