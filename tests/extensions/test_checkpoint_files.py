import contextlib
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.extensions import checkpoint_files, outbox
from tekoa.extensions.checkpoint_files import CheckpointFileReader, CheckpointFileWriter
from tekoa.store import errors, load
from tekoa.store.commit import paths
from tekoa.store.read import restore
from tekoa.testing import assert_trees_equal


def test_a_stored_checkpoint_is_restored_completely(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path)
    checkpoint = summary(3)
    assert writer(checkpoint) is checkpoint
    writer.close()
    restored = CheckpointFileReader(tmp_path, target="model").restore(summary(0).state)
    assert_trees_equal(restored.state, checkpoint.state)
    assert restored.data_state == {"next": 3}
    assert dict(restored.facts) == {"steps_per_dispatch": 1}


def test_the_calls_of_the_original_guide_work(tmp_path, summary):
    writer = CheckpointFileWriter(output_dir=str(tmp_path))
    writer(summary(3))
    writer.close()
    for name in ("dir", "input_dir"):
        reader = CheckpointFileReader(**{name: str(tmp_path)}, target="model")
        assert reader.target == "model"
        assert int(reader.restore(summary(0).state).state.step) == 3
    with pytest.raises(TypeError, match="CheckpointFileReader got 'dir' in addition"):
        CheckpointFileReader(tmp_path, dir=tmp_path, target=None)


def test_only_the_newest_steps_are_kept(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path, keep=2, keep_every=4)
    for step in range(1, 8):
        writer(summary(step))
        writer.wait()
    writer.close()
    assert sorted(int(p.name.split("_")[-1]) for p in tmp_path.glob("*[0-9]")) == [4, 6, 7]


def test_an_empty_directory_means_from_scratch(tmp_path, summary):
    reader = CheckpointFileReader(tmp_path / "none", target="model")
    assert reader.target == "model"
    assert reader.restore(summary(0).state) is None
    assert not (tmp_path / "none").exists()


def write(directory, summary, *steps):
    writer = CheckpointFileWriter(directory, keep=5)
    for step in steps:
        writer(summary(step))
    writer.close()


def damage(directory, step):
    (paths.step_dir(directory, step) / paths.INDEX).write_text("{}")


def test_a_directory_of_quarantined_steps_does_not_mean_from_scratch(tmp_path, summary):
    write(tmp_path, summary, 1)
    (tmp_path / "checkpoint_1").rename(tmp_path / f"checkpoint_1.bad-{'0' * 32}")
    with pytest.raises(errors.NothingUsableError, match="quarantined earlier"):
        CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)


def test_a_damaged_step_is_quarantined_and_written_again(tmp_path, summary, monkeypatch):
    write(tmp_path, summary, 1, 2)
    damage(tmp_path, 2)
    n_reads, restore_step = [], restore.restore_step
    monkeypatch.setattr(
        restore, "restore_step", lambda *args, **kw: n_reads.append(1) or restore_step(*args, **kw)
    )
    restored = CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)
    assert int(restored.state.step) == 1
    assert len(n_reads) == 1
    assert paths.list_steps(tmp_path) == [1]
    assert len(paths.unfinished(tmp_path, "bad")) == 1
    write(tmp_path, summary, 2)
    assert int(load(tmp_path)["step"]) == 2


def test_nothing_is_quarantined_in_a_read_only_directory(tmp_path, summary, monkeypatch):
    write(tmp_path, summary, 1, 2)
    damage(tmp_path, 2)
    # Patched, because the mode of a directory does not stop root.
    monkeypatch.setattr(checkpoint_files.os, "access", lambda *_: False)
    restored = CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)
    assert int(restored.state.step) == 1
    assert paths.list_steps(tmp_path) == [1, 2]


def test_quarantine_can_be_disabled(tmp_path, summary):
    write(tmp_path, summary, 1, 2)
    damage(tmp_path, 2)
    reader = CheckpointFileReader(tmp_path, target=None, quarantine=False)
    assert int(reader.restore(summary(0).state).state.step) == 1
    assert paths.list_steps(tmp_path) == [1, 2]


def test_reader_and_writer_alternate_in_one_program(tmp_path, summary):
    for step in (1, 2):
        CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)
        writer = CheckpointFileWriter(tmp_path)
        writer(summary(step))
        writer.close()
    assert (
        int(CheckpointFileReader(tmp_path, target=None).restore(summary(0).state).state.step) == 2
    )


def test_an_existing_step_is_left_unchanged(tmp_path, summary):
    for _ in range(2):
        writer = CheckpointFileWriter(tmp_path)
        writer(summary(5))
        writer.close()


def test_a_stored_step_can_be_loaded_without_a_loop(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path)
    writer(summary(3))
    writer.close()
    items = load(tmp_path)
    np.testing.assert_array_equal(items["model_params"]["w"], np.ones((2, 2)))
    assert int(items["step"]) == 3


def test_another_shape_is_an_error(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path)
    writer(summary(3))
    writer.close()
    other = summary(0).state.replace(params={"w": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="model_params/w"):
        CheckpointFileReader(tmp_path, target=None).restore(other)


def test_writer_records_each_start_of_the_program(tmp_path, summary):
    for step in (1, 2):
        write(tmp_path, summary, step)
    record = json.loads((tmp_path / "run.json").read_text())
    assert len(record["starts"]) == 2
    assert record["versions"]["jax"] == jax.__version__
    with contextlib.closing(CheckpointFileWriter(tmp_path / "other", run_file=False)) as writer:
        writer(summary(1))
    assert not (tmp_path / "other" / "run.json").exists()


def test_a_step_is_committed_after_the_points_before_it(tmp_path, summary):
    may_write = threading.Event()

    class SlowSink:
        def write(self, records):
            assert may_write.wait(20)

        def sync(self):
            pass

        def close(self):
            pass

    points = outbox.Outbox(SlowSink(), name="points")
    points.put([1])
    writer = CheckpointFileWriter(tmp_path)
    writer(summary(1))  # Does not wait.
    assert not writer._store.wait(timeout_seconds=0.3)
    assert paths.list_steps(tmp_path) == []
    may_write.set()
    writer.close()
    assert paths.list_steps(tmp_path) == [1]
    points.close()


def test_a_step_whose_validation_was_interrupted_is_saved_and_owed(tmp_path, summary):
    def validate(checkpoint):
        if checkpoint.step > 3:
            raise InterruptedError
        return checkpoint

    with contextlib.closing(CheckpointFileWriter(tmp_path, keep=2)) as writer:
        metrics = {"train": {"loss": 0.5}, "param_norms": {"a/b": 2.0}}
        checkpoint_files.process(summary(3, **metrics), [validate], [writer])
        with pytest.raises(InterruptedError):
            checkpoint_files.process(summary(5, **metrics), [validate], [writer])
    assert checkpoint_files.owed(tmp_path, summary(3)) is None
    assert checkpoint_files.owed(tmp_path, summary(4)) is None
    owed = checkpoint_files.owed(tmp_path, summary(5))
    assert owed is not None
    assert owed.metrics == metrics
