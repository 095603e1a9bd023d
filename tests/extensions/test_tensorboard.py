import errno

import numpy as np
import pytest

from support import events
from tekoa.extensions import outbox, tensorboard
from tekoa.extensions.checkpoint_files import CheckpointFileWriter
from tekoa.extensions.tensorboard import SummaryWriter, TensorBoardWriter
from tekoa.loop.media import Histogram, Image, Text
from tekoa.store.commit import paths


def run(directory, summary, steps, value=1.0):
    writer = TensorBoardWriter(directory)
    for step in steps:
        writer(summary(step, train={"loss": value}, eval={"loss": value + 1}))
    return writer


def write(writer, checkpoint):
    writer(checkpoint)
    writer.close()


def test_points_are_on_disk_after_a_flush(tmp_path, summary):
    writer = run(tmp_path, summary, [1, 2])
    assert writer.flush()
    assert events.read_points(tmp_path) == {
        "train/loss": [(1, 1.0), (2, 1.0)],
        "eval/loss": [(1, 2.0), (2, 2.0)],
    }
    writer.close()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_no_point_is_missing_or_duplicated_after_resuming(tmp_path, summary, is_closed):
    writers = []
    for value, steps in enumerate([range(1, 8), range(4, 11), range(9, 13), range(13, 15)]):
        writers.append(run(tmp_path, summary, steps, float(value)))
        assert writers[-1].flush()
        if is_closed:
            writers.pop().close()
    expected = [0.0] * 3 + [1.0] * 5 + [2.0] * 4 + [3.0] * 2
    assert events.read_points(tmp_path)["train/loss"] == list(enumerate(expected, start=1))


def test_parameter_scales_are_written_on_request(tmp_path, summary):
    write(TensorBoardWriter(tmp_path, params=True), summary(3))
    assert events.read_points(tmp_path) == {"params/w (2, 2)": [(3, 1.0)]}


def test_numpy_values_are_accepted(tmp_path, summary):
    write(TensorBoardWriter(tmp_path), summary(1, eval={"m": np.float32(0.5)}))
    assert events.read_points(tmp_path)["eval/m"] == [(1, 0.5)]


def test_the_call_of_the_original_guide_works(tmp_path, summary):
    assert SummaryWriter is TensorBoardWriter
    write(SummaryWriter(output_dir=str(tmp_path)), summary(1, eval={"m": 0.5}))
    assert events.read_points(tmp_path)["eval/m"] == [(1, 0.5)]


def test_a_loop_that_returns_to_an_earlier_step_replaces_its_points(tmp_path, summary):
    writer = run(tmp_path, summary, [1, 2, 3], 1.0)
    for step in (2, 3, 3):
        writer(summary(step, train={"loss": 5.0}))
    writer.close()
    assert events.read_points(tmp_path)["train/loss"] == [(1, 1.0), (2, 5.0), (3, 5.0)]


@pytest.mark.parametrize("newest", ["2147483647.host.9", "not-a-time", "1900000000"])
def test_a_clock_that_was_set_back_does_not_change_the_order_of_files(tmp_path, summary, newest):
    run(tmp_path, summary, [1, 2], 1.0).close()
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / f"events.out.tfevents.{newest}")
    run(tmp_path, summary, [2, 3], 5.0).close()
    run(tmp_path, summary, [3, 4], 6.0).close()
    assert events.read_points(tmp_path)["train/loss"] == [(1, 1.0), (2, 5.0), (3, 6.0), (4, 6.0)]


class FullDisk:
    """Makes the event files of this process fail like those on a full disk."""

    def __init__(self, monkeypatch):
        self.n_free = None
        self._open = open
        monkeypatch.setattr(tensorboard, "open", self.open, raising=False)

    def open(self, *args, **kwargs):
        file = self._open(*args, **kwargs)
        disk = self

        class File:
            def write(self, data):
                if disk.n_free is None:
                    return file.write(data)
                if not disk.n_free:
                    raise OSError(errno.ENOSPC, "No space left on device")
                n_written = file.write(data[: disk.n_free])
                disk.n_free -= n_written
                return n_written

            def __getattr__(self, name):
                return getattr(file, name)

        return File()


@pytest.mark.parametrize("n_free", [0, 30])
def test_a_full_disk_is_reported_once_and_points_resume(
    tmp_path, summary, monkeypatch, caplog, n_free
):
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.01)
    disk = FullDisk(monkeypatch)
    writer, files = TensorBoardWriter(tmp_path / "events"), CheckpointFileWriter(tmp_path / "steps")
    for step in range(1, 7):
        disk.n_free = n_free if step == 3 else disk.n_free
        files(writer(summary(step, train={"loss": float(step)})))
        files.wait()
        assert store_steps(tmp_path) == [step]
    assert not writer.flush()
    assert caplog.text.count("No space left on device") == 1
    assert [step for step, _ in events.read_points(tmp_path / "events")["train/loss"]] == [1, 2]
    disk.n_free = None
    writer.close()
    files.close()
    expected = [(step, float(step)) for step in range(1, 7)]
    assert events.read_points(tmp_path / "events")["train/loss"] == expected


def store_steps(directory):
    return paths.list_steps(directory / "steps")


def test_texts_histograms_and_images_are_read_by_tensorboard(tmp_path, summary):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoardWriter(tmp_path)
    checkpoint = summary(3).with_media("text", Text("Once"))
    checkpoint = checkpoint.with_media("weights", Histogram([1, 3], [0.0, 0.5, 1.0]))
    writer(checkpoint.with_media("picture", Image(np.zeros((2, 5, 3)))))
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("text")
    assert (text.step, text.tensor_proto.string_val[0]) == (3, b"Once")
    # TensorBoard converts histograms and images to tensors, or keeps them as they are.
    tags = events.Tags()
    assert "weights" in [*tags["histograms"], *tags["tensors"]]
    assert "picture" in [*tags["images"], *tags["tensors"]]
