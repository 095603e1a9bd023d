"""The curves equal those that TensorBoard itself reads."""

import math
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.record_writer import masked_crc32c

from support import hostile
from tekoa.estimator.report import events
from tekoa.extensions.tensorboard import ScalarWriter
from tekoa.store import errors


def write(directory, steps, *, resume_from, value=1.0):
    writer = ScalarWriter(directory)
    writer.discard_from(resume_from + 1)
    for step in steps:
        writer.add({"train/loss": value * step, "params/w (2, 3)": 0.5}, step)
    writer.close()


def read_by_tensorboard(directory):
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(p.step, p.wall_time, p.value) for p in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


@pytest.mark.parametrize("n_starts", [1, 3])
def test_points_over_restarts_equal_those_of_tensorboard(tmp_path, n_starts):
    for i in range(n_starts):
        write(tmp_path, range(5 * i, 5 * i + 10), resume_from=5 * i - 1, value=float(i + 1))
    curves = events.read_curves(tmp_path)
    assert {tag: [p[:3] for p in points] for tag, points in curves.items()} == read_by_tensorboard(
        tmp_path
    )
    assert [p.start for p in curves["train/loss"]][-1] == n_starts - 1


def test_complete_records_of_a_file_being_written_are_read(tmp_path):
    write(tmp_path, range(3), resume_from=-1)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    for n_missing in range(1, 60):
        file.write_bytes(data[:-n_missing])
        assert [p.step for p in events.read_curves(tmp_path)["train/loss"]][:2] == [0, 1]


def test_damaged_file_is_read_up_to_the_damage(tmp_path):
    write(tmp_path, range(3), resume_from=-1)
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"\xff" * 40)
    problems = []
    assert len(events.read_curves(tmp_path, problems)["train/loss"]) == 3
    assert problems == [
        f"{file}: is damaged at byte {size}: the length of the record does not match its checksum."
    ]
    with pytest.raises(errors.DamagedError, match=f"at byte {size}"):
        events.read_curves(tmp_path)


def test_event_of_gigabytes_is_damage_and_costs_no_memory(tmp_path):
    length = struct.pack("<Q", 9 * 2**30)
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(length + struct.pack("<I", masked_crc32c(length)))
    hostile.sparse(file)
    problems = []
    assert events.read_curves(tmp_path, problems) == {}
    assert "the record has 9663676416 bytes, at most 268435456" in problems[0]


@pytest.mark.parametrize("make", hostile.IRREGULAR.values(), ids=hostile.IRREGULAR.keys())
def test_what_is_not_a_file_is_reported(tmp_path, make):
    make(tmp_path / "events.out.tfevents.1")
    problems = []
    assert events.read_curves(tmp_path, problems) == {}
    assert len(problems) == 1


def test_nan_is_read_as_nan(tmp_path):
    write(tmp_path, [1], resume_from=-1, value=math.nan)
    assert math.isnan(events.read_curves(tmp_path)["train/loss"][0].value)


def test_directory_without_files_has_no_curves(tmp_path):
    assert events.read_curves(tmp_path) == {}


def test_newer_points_replace_those_of_the_same_step(tmp_path):
    writer = ScalarWriter(tmp_path)
    for value, commit in ((1.0, "a"), (2.0, "b")):
        writer.add({"eval/loss": value}, 3, commit=commit)
    writer.close()
    (point,) = events.read_curves(tmp_path)["eval/loss"]
    assert (point.step, point.value, point.commit) == (3, 2.0, "b")
