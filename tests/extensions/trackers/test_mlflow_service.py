"""MLflow itself, with a database in a file; skipped where it is not installed."""

import json
import sys

import numpy as np
import pytest

from extensions.trackers.kills import killed_run
from tekoa import _extras
from tekoa.extensions.trackers import mlflow_service
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.loop.media import Image, Text


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(_extras.MissingPackageError, match=r"pip install 'tekoa\[mlflow\]'"):
        Tracker("mlflow")


@pytest.fixture
def client(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the database of mlflow is not installed")
    monkeypatch.chdir(tmp_path)  # Artifacts go to the current directory.
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    client.uri = uri
    return client


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_point_is_there_once_after_kills(tmp_path, client):
    run, rows = killed_run(tmp_path, "mlflow", MLFLOW_TRACKING_URI=client.uri)
    experiment = client.get_experiment_by_name("tiny_model")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == json.loads((run / "tracker_mlflow.json").read_text())["id"]
    assert found.info.status == "FINISHED"
    for name in ("train/loss", "seconds"):
        history = client.get_metric_history(found.info.run_id, name)
        points = sorted((metric.step, metric.value) for metric in history)
        assert points == [(row["step"], row[name]) for row in rows if name in row]
    assert found.data.params["flags.max_train_steps"] == "40"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_points_that_follow_soon_are_one_request(tmp_path, summary, client, monkeypatch):
    monkeypatch.setattr(mlflow_service, "_SECONDS_BETWEEN_REQUESTS", 1e9)
    tracker, sizes = Tracker("mlflow", tmp_path / "run", tracking_uri=client.uri), []
    service = tracker._service._client
    log_batch = service.log_batch

    def counted(run_id, metrics=(), params=()):
        sizes.append(len({metric.step for metric in metrics}))
        log_batch(run_id, metrics=metrics, params=params)

    monkeypatch.setattr(service, "log_batch", counted)
    for step in range(1, 6):
        tracker(summary(step, train={"loss": step / 8}))
    tracker.close()
    assert sizes == [0, 1, 4]
    run_id = json.loads((tmp_path / "run" / "tracker_mlflow.json").read_text())["id"]
    history = client.get_metric_history(run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(i, i / 8) for i in range(1, 6)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_media_are_artifacts(tmp_path, summary, client):
    tracker = Tracker("mlflow", tmp_path / "run", tracking_uri=client.uri)
    checkpoint = summary(7, train={"loss [mean]": 0.25})
    checkpoint = checkpoint.with_media("sample", Text("Once"))
    tracker(checkpoint.with_media("picture", Image(np.zeros((2, 2)))))
    tracker.close()
    run_id = json.loads((tmp_path / "run" / "tracker_mlflow.json").read_text())["id"]
    assert client.get_run(run_id).data.metrics["train/loss _mean_"] == 0.25
    files = [client.list_artifacts(run_id, name)[0].path for name in ("sample", "picture")]
    assert files == ["sample/00000007.txt", "picture/00000007.png"]
