"""The newest valid step: damaged steps are skipped and reported, never silently."""

import pytest

from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.read import newest


def fill(directory, *steps):
    for step in steps:
        paths.step_dir(directory, step).mkdir()


def damaged(*bad):
    def use(path):
        step = paths.parse_step(path.name)
        if step in bad:
            raise errors.DamagedError(f"{path}: bad")
        return step

    return use


def test_newest_valid_step_is_used_and_skipped_ones_are_reported(tmp_path, caplog):
    fill(tmp_path, 1, 9, 10, 11)
    valid = newest.newest_valid(tmp_path, damaged(11, 10))
    assert (valid.value, valid.step) == (9, 9)
    assert [skip.step for skip in valid.skipped] == [11, 10]
    assert caplog.text.count("skipped step") == 2


def test_no_step_at_all_is_none(tmp_path):
    assert newest.newest_valid(tmp_path, damaged()) is None
    assert newest.newest_valid(tmp_path / "missing", damaged()) is None


def test_only_damaged_steps_raise(tmp_path):
    fill(tmp_path, 1, 2)
    with pytest.raises(errors.NothingUsableError, match=r"(?s)step 2.*step 1.*empty directory"):
        newest.newest_valid(tmp_path, damaged(1, 2))


def test_a_directory_with_quarantined_steps_only_is_not_an_empty_one(tmp_path):
    paths.new_dir(tmp_path, 1, "bad").mkdir()
    with pytest.raises(errors.NothingUsableError, match="quarantined earlier"):
        newest.newest_valid(tmp_path, damaged())


def test_other_errors_do_not_skip_a_step(tmp_path):
    fill(tmp_path, 1, 2)

    def use(path):
        raise errors.MismatchError("does not fit")

    with pytest.raises(errors.MismatchError):
        newest.newest_valid(tmp_path, use)


def test_removed_step_does_not_count_as_damaged(tmp_path):
    fill(tmp_path, 1)

    def use(path):
        if path.name == "checkpoint_1":
            path.rmdir()
            fill(tmp_path, 2)
            raise FileNotFoundError(path)
        return "read"

    valid = newest.newest_valid(tmp_path, use)
    assert (valid.value, valid.step, valid.skipped) == ("read", 2, [])


def test_steps_that_are_always_removed_raise(tmp_path):
    fill(tmp_path, 1)

    def use(path):
        path.rmdir()
        fill(tmp_path, paths.parse_step(path.name) + 1)
        raise FileNotFoundError(path)

    with pytest.raises(errors.StepGoneError, match="pinned"):
        newest.newest_valid(tmp_path, use)
