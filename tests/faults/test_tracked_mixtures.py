"""All at once: a mixture of packed documents, all trackers and a run in S3, killed and resumed.

The packages of the `ecosystem-test` extra are needed.
"""

import json
import signal
import subprocess
import sys

import pytest

from support import object_stores, processes
from tekoa import store
from tekoa.extensions.trackers import wandb_service
from tekoa.store.read.json_lines import read_rows
from tekoa.testing import assert_trees_equal

URL = "s3://mixtures/run"
FETCH = """
import shutil, sys
from tekoa import store
shutil.copytree(store.fetched(sys.argv[1], steps="all"), sys.argv[2])
"""
# Each start is on another machine; only the last one is on that of the one before.
KILLS = ["after_rename:3", "mid_upload:16", "before_head:2"]
TRAIN = [
    *("train", "transformer_lm", "--random_seed=3", "--max_train_steps=40"),
    *("--check_every_steps=4", "--max_ckpt=3", "--train_batch_size=4", "--num_valid_examples=2"),
    *("--module_config.pack=True", "--module_config.seq_length=16", "--module_config.width=16"),
    *("--module_config.n_layers=1", "--module_config.n_heads=2"),
]


@pytest.fixture
def server(monkeypatch):
    for name in ("wandb", "mlflow", "sqlalchemy"):
        pytest.importorskip(name, reason="needs tekoa[ecosystem-test]")
    service = object_stores.S3()
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.client("s3").create_bucket(Bucket="mixtures")
    yield service
    service.stop()


def pattern(directory):
    """A mixture of two files of lines, of which the smaller one starts over again and again."""
    for name, n in (("long", 300), ("short", 40)):
        lines = (f"{name} line {i}" * (i % 3) + "." for i in range(n))
        directory.joinpath(f"{name}.txt").write_text("\n".join(lines))
    return f"mix://0.6*{directory}/long.txt; 0.4*{directory}/short.txt"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_point_is_there_once_and_the_bits_are_the_same(server, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    words = [*TRAIN, f"--train_pattern={pattern(tmp_path)}", f"--valid_pattern={tmp_path}/long.txt"]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    variables = {
        **processes.compile_cache(tmp_path / "programs"),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": uri,
    }

    def run(*flags, code, machine="none", **env):
        env |= {"XDG_CACHE_HOME": str(tmp_path / machine), **variables}
        command = processes.Command([*words, *flags], tmp_path / "log.txt", **env)
        assert command.wait()[0] == code, command.output()
        return command.output()

    run("--model_dir=undisturbed", code=0)
    flags = [f"--model_dir={URL}", "--track=wandb,mlflow,csv"]
    for i, point in enumerate(KILLS):
        run(*flags, code=-signal.SIGKILL, machine=f"{i}", TEKOA_FAULT_AT=f"{point}:SIGKILL")
    output = run(*flags, code=0, machine=f"{i}")
    assert "Resuming from step" in output
    while "not everything was sent" in output:  # On a machine that is very busy.
        output = run(*flags, code=0, machine=f"{i}")

    # In a process of its own: clients of a server are kept for as long as a process lives.
    path = tmp_path / "fetched"
    subprocess.run([sys.executable, "-c", FETCH, URL, path], check=True)
    resumed, expected = (store.load(x) for x in (path, tmp_path / "undisturbed"))
    assert_trees_equal(resumed["model_params"], expected["model_params"])
    assert_trees_equal(resumed["optimizer_state"], expected["optimizer_state"])
    rows, expected = (read_rows(x / "metrics.jsonl") for x in (path, tmp_path / "undisturbed"))
    names = [x for x in expected[-1] if x.startswith("train/") and "seconds" not in x]
    values = [{name: row.get(name) for name in ("step", *names)} for row in rows]
    assert values == [{name: row.get(name) for name in ("step", *names)} for row in expected]

    curve = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    lines = (path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", *(str(row["step"]) for row in rows)]
    run_id = json.loads((path / "tracker_mlflow.json").read_text())["id"]
    history = mlflow.MlflowClient(uri).get_metric_history(run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == curve
    points = [x for f in path.glob("wandb/*/*.wandb") for x in wandb_service.offline_points(f)]
    assert sorted((i, x["train/loss"]) for i, x in points if "train/loss" in x) == curve
