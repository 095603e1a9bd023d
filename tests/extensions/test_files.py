import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.extensions import files
from tekoa.extensions.files import CheckpointFileReader, CheckpointFileWriter
from tekoa.store import errors, load, names
from tekoa.testing import assert_trees_equal


def test_what_was_written_is_read_back_whole(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path)
    given = summary(3)
    assert writer(given) is given
    writer.close()
    found = CheckpointFileReader(tmp_path, target="model").restore(summary(0).state)
    assert_trees_equal(found.state, given.state)
    assert (found.data_state, dict(found.facts)) == ({"next": 3}, {"steps_per_dispatch": 1})


def test_only_the_newest_stay(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path, keep=2, keep_every=4)
    for step in range(1, 8):
        writer(summary(step))
        writer.wait()
    writer.close()
    assert sorted(int(p.name.split("_")[-1]) for p in tmp_path.glob("*[0-9]")) == [4, 6, 7]


def test_an_empty_directory_is_a_start_from_scratch(tmp_path, summary):
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
    (names.step_dir(directory, step) / names.INDEX).write_text("{}")


def test_only_steps_put_aside_are_no_start_from_scratch(tmp_path, summary):
    write(tmp_path, summary, 1)
    (tmp_path / "checkpoint_1").rename(tmp_path / f"checkpoint_1.bad-{'0' * 32}")
    with pytest.raises(errors.NothingUsableError, match="put aside earlier"):
        CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)


def test_a_damaged_step_is_put_aside_and_written_anew(tmp_path, summary):
    write(tmp_path, summary, 1, 2)
    damage(tmp_path, 2)
    found = CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)
    assert int(found.state.step) == 1
    assert names.list_steps(tmp_path) == [1]
    assert len(names.unfinished(tmp_path, "bad")) == 1
    write(tmp_path, summary, 2)
    assert int(load(tmp_path)["step"]) == 2


def test_nothing_is_moved_where_it_cannot_be(tmp_path, summary, monkeypatch):
    write(tmp_path, summary, 1, 2)
    damage(tmp_path, 2)
    # Asked so that it holds for root too, whom a mode of the directory does not stop.
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    found = CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)
    assert int(found.state.step) == 1
    assert names.list_steps(tmp_path) == [1, 2]


def test_reader_and_writer_take_turns_in_one_program(tmp_path, summary):
    for step in (1, 2):
        CheckpointFileReader(tmp_path, target=None).restore(summary(0).state)
        writer = CheckpointFileWriter(tmp_path)
        writer(summary(step))
        writer.close()
    assert (
        int(CheckpointFileReader(tmp_path, target=None).restore(summary(0).state).state.step) == 2
    )


def test_a_step_that_is_there_is_left_alone(tmp_path, summary):
    for _ in range(2):
        writer = CheckpointFileWriter(tmp_path)
        writer(summary(5))
        writer.close()


def test_a_stored_step_can_be_loaded_without_a_loop(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path)
    writer(summary(3))
    writer.close()
    found = load(tmp_path)
    np.testing.assert_array_equal(found["model_params"]["w"], np.ones((2, 2)))
    assert int(found["step"]) == 3


def test_another_shape_is_refused(tmp_path, summary):
    writer = CheckpointFileWriter(tmp_path)
    writer(summary(3))
    writer.close()
    other = summary(0).state.replace(params={"w": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="model_params/w"):
        CheckpointFileReader(tmp_path, target=None).restore(other)


def test_metrics_are_joined_by_name(summary):
    given = summary(1, train={"loss": 1}, eval={"loss": np.float32(2)})
    assert files.flat_metrics(given) == {"train/loss": 1.0, "eval/loss": 2.0}
