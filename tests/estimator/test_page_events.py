"""The curves are those that TensorBoard itself reads."""

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tekoa.estimator import page_events
from tekoa.extensions.tensorboard import PointWriter


def write(directory, steps, *, go_on_from, value=1.0):
    writer = PointWriter(directory)
    writer.go_on_from(go_on_from)
    for step in steps:
        writer.add("train/loss", value * step, step)
        writer.add("params/w (2, 3)", 0.5, step)
    writer.close()


def of_tensorboard(directory):
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(p.step, p.wall_time, p.value) for p in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


@pytest.mark.parametrize("n_starts", [1, 3])
def test_points_are_those_of_tensorboard_over_restarts(tmp_path, n_starts):
    for i in range(n_starts):
        write(tmp_path, range(5 * i, 5 * i + 10), go_on_from=5 * i - 1, value=float(i + 1))
    curves = page_events.read_curves(tmp_path)
    assert {tag: [p[:3] for p in points] for tag, points in curves.items()} == of_tensorboard(
        tmp_path
    )
    assert [p.start for p in curves["train/loss"]][-1] == n_starts - 1


def test_a_file_that_is_being_written_is_read_as_far_as_it_is_whole(tmp_path):
    write(tmp_path, range(3), go_on_from=-1)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    for n_missing in range(1, 60):
        file.write_bytes(data[:-n_missing])
        assert [p.step for p in page_events.read_curves(tmp_path)["train/loss"]][:2] == [0, 1]


def test_damage_ends_the_file_not_the_program(tmp_path):
    write(tmp_path, range(3), go_on_from=-1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b"\xff" * 40)
    assert len(page_events.read_curves(tmp_path)["train/loss"]) == 3


def test_values_that_are_not_finite_are_kept(tmp_path):
    write(tmp_path, [1], go_on_from=-1, value=math.nan)
    assert math.isnan(page_events.read_curves(tmp_path)["train/loss"][0].value)


def test_no_files_are_no_curves(tmp_path):
    assert page_events.read_curves(tmp_path) == {}
