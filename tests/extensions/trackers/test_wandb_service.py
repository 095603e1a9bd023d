"""Weights & Biases itself, offline; skipped where it is not installed."""

import sys

import numpy as np
import pytest

from extensions.trackers.kills import killed_run
from tekoa import _extras
from tekoa.extensions.trackers import wandb_service
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.loop.media import Histogram, Image, Text


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(_extras.MissingPackageError, match=r"pip install 'tekoa\[wandb\]'"):
        Tracker("wandb")


@pytest.mark.slow
def test_each_point_is_there_once_after_kills(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    run, rows = killed_run(tmp_path, "wandb", WANDB_MODE="offline")
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1, "one id"
    points = dict(point for path in files for point in wandb_service.offline_points(path))
    n_points = sum(1 for path in files for _ in wandb_service.offline_points(path))
    assert n_points == len(rows)
    assert {step: point["train/loss"] for step, point in points.items() if step} == {
        row["step"]: row["train/loss"] for row in rows if row["step"]
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_media_and_config_are_logged(tmp_path, summary):
    pytest.importorskip("wandb", reason="wandb is not installed")
    pytest.importorskip("PIL", reason="pillow is not installed")
    tracker = Tracker("wandb", tmp_path, mode="offline", config={"rate": 0.5})
    checkpoint = summary(1, train={"loss": 0.25})
    for name, media in {
        "sample": Text("a < b"),
        "weights": Histogram([1, 3], [0.0, 0.5, 1.0]),
        "picture": Image(np.zeros((2, 2, 3))),
    }.items():
        checkpoint = checkpoint.with_media(name, media)
    tracker(checkpoint)
    tracker.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    ((_, point),) = wandb_service.offline_points(path)
    assert point["train/loss"] == 0.25
    assert point["weights/values"] == [1, 3]
    (text,) = tmp_path.glob("wandb/offline-run-*/files/media/html/sample*")
    assert "a &lt; b" in text.read_text()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/picture*.png"))
    assert b"rate" in path.read_bytes()


def test_points_that_are_not_in_the_file_yet_are_an_error(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setattr(wandb_service, "_FLUSH_SECONDS", 0.0)
    service = wandb_service.WandbService()
    service._directory, service._last = tmp_path, 3
    with pytest.raises(TimeoutError, match="has not written all points of run abc"):
        service._wait_for_file("abc")
