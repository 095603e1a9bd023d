import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tekoa.extensions.tensorboard import SummaryWriter, TensorBoardWriter


def points(directory):
    """Returns what TensorBoard shows: tag to [(step, value)]."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(point.step, point.value) for point in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def run(directory, summary, steps, value=1.0):
    writer = TensorBoardWriter(directory)
    for step in steps:
        writer(summary(step, train={"loss": value}, eval={"loss": value + 1}))
    return writer


def test_points_are_on_disk_when_the_stage_returns(tmp_path, summary):
    writer = run(tmp_path, summary, [1, 2])
    assert points(tmp_path) == {
        "train/loss": [(1, 1.0), (2, 1.0)],
        "eval/loss": [(1, 2.0), (2, 2.0)],
    }
    writer.close()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_no_point_is_missing_or_duplicated_after_resuming(tmp_path, summary, is_closed):
    writers = []
    for value, steps in enumerate([range(1, 8), range(4, 11), range(9, 13), range(13, 15)]):
        writers.append(run(tmp_path, summary, steps, float(value)))
        if is_closed:
            writers.pop().close()
    expected = [0.0] * 3 + [1.0] * 5 + [2.0] * 4 + [3.0] * 2
    assert points(tmp_path)["train/loss"] == list(enumerate(expected, start=1))


def test_parameter_scales_are_written_on_request(tmp_path, summary):
    TensorBoardWriter(tmp_path, params=True)(summary(3))
    assert points(tmp_path) == {"params/w (2, 2)": [(3, 1.0)]}


def test_numpy_values_are_accepted(tmp_path, summary):
    TensorBoardWriter(tmp_path)(summary(1, eval={"m": np.float32(0.5)}))
    assert points(tmp_path)["eval/m"] == [(1, 0.5)]


def test_the_call_of_the_original_guide_works(tmp_path, summary):
    assert SummaryWriter is TensorBoardWriter
    SummaryWriter(output_dir=str(tmp_path))(summary(1, eval={"m": 0.5}))
    assert points(tmp_path)["eval/m"] == [(1, 0.5)]
