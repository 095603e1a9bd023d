import dataclasses
import json

import pytest

from support import hostile
from tekoa.extensions import metrics_file, outbox
from tekoa.extensions.metrics_file import MetricsFile
from tekoa.loop.media import Text
from tekoa.store import errors
from tekoa.store.read.json_lines import read_rows, read_texts


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def at(summary, step, loss=0.5):
    return dataclasses.replace(summary(step), n_completed_steps=1).with_metrics(
        "eval", {"loss": loss}
    )


def test_every_checkpoint_is_one_line(tmp_path, summary):
    writer = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    for step in (1, 2):
        writer(at(summary, step, loss=step / 2))
    writer.close()
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["eval/loss"]) for row in rows] == [(1, 0.5), (2, 1.0)]
    assert writer.rows == rows


def test_after_a_roll_back_each_step_is_there_once(tmp_path, summary):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (1, 2, 3):
        first(at(summary, step, loss=1.0))
    first.close()
    second = MetricsFile(path)
    second(at(summary, 2, loss=7.0))
    second.close()
    assert [(row["step"], row["eval/loss"]) for row in lines(path)] == [(1, 1.0), (2, 7.0)]


def test_a_loop_that_returns_to_an_earlier_step_replaces_its_lines(tmp_path, summary):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsFile(path)
    for step, loss in ((1, 1.0), (2, 1.0), (3, 1.0), (2, 7.0), (2, 8.0)):
        writer(at(summary, step, loss=loss))
    writer.close()
    assert [(row["step"], row["eval/loss"]) for row in lines(path)] == [(1, 1.0), (2, 8.0)]
    assert writer.rows == lines(path)


@pytest.mark.parametrize("kind", [*hostile.IRREGULAR, "sparse", "deep"])
def test_what_is_not_a_metrics_file_is_refused_in_bounded_memory(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    if kind == "deep":
        path.write_bytes(b"[" * 100_000 + b"\n\n")
    else:
        {**hostile.IRREGULAR, "sparse": hostile.sparse}[kind](path)
    if kind == "dangling link":
        assert read_rows(path) == []
        return
    with pytest.raises(errors.DamagedError, match=r"metrics\.jsonl.*Move it away"):
        read_rows(path)


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path, summary):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "tr')
    assert read_rows(path) == [{"step": 1}]
    writer = MetricsFile(path)
    writer(at(summary, 2))
    writer.close()
    assert [row["step"] for row in lines(path)] == [1, 2]


def test_a_line_that_a_failed_write_cut_off_is_written_again(tmp_path):
    sink = metrics_file._Lines(tmp_path / "metrics.jsonl")
    sink.write([metrics_file._Contents([{"step": 1}])])
    sink._file.write(b'{"step": 2, "tr')  # Then the disk was full.
    sink.write([{"step": 2}])
    sink.close()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_nan_is_null(tmp_path, summary):
    writer = MetricsFile(tmp_path / "metrics.jsonl")
    writer(at(summary, 1, loss=float("nan")))
    writer.close()
    assert lines(tmp_path / "metrics.jsonl")[0]["eval/loss"] is None


def test_a_file_of_another_program_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('hello\n{"step": 1}\n')
    with pytest.raises(
        errors.DamagedError, match="line 1, is not a JSON object with a 'step': 'hello'"
    ):
        MetricsFile(path)


def test_a_disk_that_fails_does_not_stop_training_and_loses_no_line(tmp_path, summary, caplog):
    writer = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    blocked = tmp_path / "run"
    blocked.write_text("in the way of the directory")
    writer(at(summary, 1))
    writer(at(summary, 2))
    outbox.barrier(timeout_seconds=60)()
    assert sum("Training continues" in record.message for record in caplog.records) == 1
    blocked.unlink()
    writer.close()
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_texts_are_in_a_file_beside_it(tmp_path, summary):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first(at(summary, 1))
    assert not (tmp_path / "texts.jsonl").exists()
    for step in (2, 3, 4):
        first(at(summary, step).with_media("sample", Text(f"Once {step}")))
    first.close()
    second = MetricsFile(path)
    second.discard_after(2)
    second(at(summary, 3))
    second(at(summary, 4).with_media("sample", Text("At last\n")))
    second.close()
    assert read_texts(tmp_path) == {2: {"sample": "Once 2"}, 4: {"sample": "At last\n"}}
    assert [row["step"] for row in lines(path)] == [1, 2, 3, 4]
