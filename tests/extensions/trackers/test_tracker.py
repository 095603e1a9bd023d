"""What every service can rely on, with a service that remembers its runs."""

import logging
import threading

import pytest

from tekoa.extensions import outbox
from tekoa.extensions.checkpoint_files import CheckpointFileWriter
from tekoa.extensions.metrics_file import MetricsFile
from tekoa.extensions.trackers import tracker
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.loop.media import Text
from tekoa.store.commit import fault_points


class Memory:
    """A service whose runs survive its trackers."""

    def __init__(self):
        self.runs, self.media, self.error = {}, {}, None
        self.may_log = threading.Event()
        self.may_log.set()

    def open(self, run_id, facts):
        self.id = run_id or f"run {len(self.runs)}"
        steps = self.runs.setdefault(self.id, [])
        return self.id, max(steps, default=-1)

    def log(self, row, media):
        assert self.may_log.wait(20)
        if self.error is not None:
            raise self.error
        self.runs[self.id].append(row["step"])
        self.media |= {(row["step"], name): value for name, value in media.items()}

    def close(self):
        pass


def train(directory, service, checkpoints):
    """Passes checkpoints through the stages of a run, as the command does."""
    tracker = Tracker(service, directory)
    writer = CheckpointFileWriter(directory, run_file=False)
    metrics = MetricsFile(directory / "metrics.jsonl")
    for checkpoint in checkpoints:
        writer(tracker(metrics(checkpoint)))
    metrics.close()
    writer.close()
    tracker.close()


def test_points_are_sent_once_their_step_is_committed(tmp_path, summary):
    service = Memory()
    tracker = Tracker(service, tmp_path)
    writer = CheckpointFileWriter(tmp_path, run_file=False)
    writer(tracker(summary(1)))
    writer.wait()
    tracker(summary(2))
    deadline = threading.Event()
    while service.runs.get("run 0") != [1] and not deadline.wait(0.01):
        pass
    assert service.runs == {"run 0": [1]}
    writer.close()
    tracker.close()
    assert service.runs == {"run 0": [1, 2]}


def test_nothing_is_sent_before_the_commit(tmp_path, summary, monkeypatch):
    service, is_sent, early = Memory(), threading.Event(), []
    log = service.log
    service.log = lambda *args: (is_sent.set(), log(*args))

    def reach(point):
        if point == "before_rename":
            early.append(is_sent.wait(0.2))

    monkeypatch.setattr(fault_points, "reach", reach)
    train(tmp_path, service, [summary(1)])
    assert early == [False]
    assert service.runs == {"run 0": [1]}


def test_a_resumed_run_sends_what_the_service_has_lost(tmp_path, summary):
    service = Memory()
    train(tmp_path, service, map(summary, [1, 2, 3]))
    del service.runs["run 0"][1:]
    train(tmp_path, service, map(summary, [4, 5]))
    assert service.runs == {"run 0": [1, 2, 3, 4, 5]}


def test_a_run_that_returns_to_an_earlier_step_is_a_new_one(tmp_path, summary, caplog):
    service = Memory()
    train(tmp_path, service, map(summary, [1, 2, 3]))
    train(tmp_path, service, map(summary, [3, 4]))
    assert service.runs == {"run 0": [1, 2, 3], "run 1": [1, 2, 3, 4]}
    assert "points up to step 3, and training resumed from step 2" in caplog.text
    train(tmp_path, service, map(summary, [5]))
    assert service.runs["run 1"] == [1, 2, 3, 4, 5]


def test_a_failing_service_is_one_warning_and_later_gets_all_points(
    tmp_path, summary, caplog, monkeypatch
):
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.01)
    service = Memory()
    service.error = ConnectionError("no network")
    with caplog.at_level(logging.WARNING):
        train(tmp_path, service, map(summary, [1, 2, 3]))
    assert caplog.text.count("no network") == 1
    assert "Training continues" in caplog.text
    service.error = None
    train(tmp_path, service, map(summary, [4]))
    assert service.runs == {"run 0": [1, 2, 3, 4]}


def test_a_run_that_is_complete_sends_what_the_service_lacks(tmp_path, summary):
    service = Memory()
    service.error = ConnectionError("no network")
    train(tmp_path, service, map(summary, [1, 2, 3]))
    service.error = None
    for _ in range(2):
        tracker = Tracker(service, tmp_path)
        tracker.send_missing(3)
        tracker.close()
        assert service.runs == {"run 0": [1, 2, 3]}
        service.open = None  # All was sent: the run is not opened again.


def test_a_service_that_cannot_be_closed_is_asked_again(tmp_path, summary, caplog):
    class Ending(Memory):
        ends = 0

        def close(self):
            self.ends += 1
            if self.ends == 1:
                raise ConnectionError("no network")

    service = Ending()
    train(tmp_path, service, map(summary, [1, 2]))
    assert "The next start of the run sends the rest" in caplog.text
    tracker = Tracker(service, tmp_path)
    tracker.send_missing(2)
    tracker.close()
    assert (service.runs, service.ends) == ({"run 0": [1, 2]}, 2)


def test_saves_do_not_wait_for_a_slow_service(tmp_path, summary):
    service = Memory()
    service.may_log.clear()
    tracker = Tracker(service, tmp_path)
    writer = CheckpointFileWriter(tmp_path, run_file=False)
    for step in (1, 2, 3):
        writer(tracker(summary(step)))
    writer.close()
    assert (tmp_path / "checkpoint_3").is_dir()
    assert service.runs in ({}, {"run 0": []})
    service.may_log.set()
    tracker.close()
    assert service.runs == {"run 0": [1, 2, 3]}


def test_media_are_passed_on(summary):
    service = Memory()
    tracker = Tracker(service)
    tracker(summary(1).with_media("sample", Text("Once upon")))
    tracker.close()
    assert service.media == {(1, "sample"): Text("Once upon")}


def test_texts_that_the_service_has_lost_are_sent_again(tmp_path, summary):
    service = Memory()
    checkpoints = [summary(step).with_media("sample", Text(f"Text {step}")) for step in (1, 2, 3)]
    train(tmp_path, service, checkpoints[:2])
    service.runs["run 0"].pop()
    del service.media[2, "sample"]
    train(tmp_path, service, checkpoints[2:])
    assert service.runs == {"run 0": [1, 2, 3]}
    assert service.media == {(step, "sample"): Text(f"Text {step}") for step in (1, 2, 3)}


def test_a_program_that_is_killed_while_a_run_is_created_opens_the_same_one(tmp_path, summary):
    class Killed(Memory):
        def open(self, run_id, facts):
            if run_id is None:
                facts.claim("claimed")
                raise SystemExit  # Ends the thread, like a kill.
            return super().open(run_id, facts)

    service = Killed()
    sink = tracker._ServiceSink(service, "Killed", tmp_path, Tracker(service)._facts, 0)
    with pytest.raises(SystemExit):
        sink.write([tracker.Points({"step": 1})])
    train(tmp_path, service, [summary(1)])
    assert service.runs == {"claimed": [1]}


@pytest.mark.parametrize("content", ["{", "[]", '{"id": "x", "sent": "y"}'])
def test_a_damaged_id_is_reported_and_replaced(tmp_path, summary, caplog, content):
    (tmp_path / "tracker_Memory.json").write_text(content)
    service = Memory()
    train(tmp_path, service, map(summary, [1]))
    train(tmp_path, service, map(summary, [2]))
    assert "tracker_Memory.json is damaged" in caplog.text
    assert service.runs == {"run 0": [1, 2]}


def test_mistakes_are_reported_at_once():
    with pytest.raises(ValueError, match="Did you mean 'mlflow'"):
        Tracker("mlfow")
    with pytest.raises(ValueError, match="needs a directory"):
        Tracker("csv")
