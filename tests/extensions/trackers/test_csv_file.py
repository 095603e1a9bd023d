import csv

from tekoa.extensions.trackers.csv_file import CSVService
from tekoa.extensions.trackers.tracker import Tracker


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_new_metric_becomes_a_column(tmp_path, summary):
    tracker = Tracker("csv", path=tmp_path / "run" / "metrics.csv")
    tracker(summary(1, train={"loss": 0.5}))
    tracker(summary(2, train={"loss": 0.25}, eval={"accuracy": 0.75}))
    tracker(summary(3, train={"loss": float("nan")}))
    tracker.close()
    rows = read(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["train/loss"] for row in rows] == ["0.5", "0.25", ""]
    assert [row["eval/accuracy"] for row in rows] == ["", "0.75", ""]


def test_a_line_that_could_not_be_written_is_there_once(tmp_path):
    path = tmp_path / "metrics.csv"
    service = CSVService(path)
    service.log({"step": 1, "x": 1.0}, {})
    path.unlink()
    path.mkdir()
    try:
        service.log({"step": 2, "x": 2.0}, {})
    except OSError:
        path.rmdir()
    service.log({"step": 2, "x": 2.0}, {})
    service.log({"step": 3, "x": 3.0}, {})
    assert [row["step"] for row in read(path)] == ["1", "2", "3"]
