"""Walking back: the newest that works, skips reported, never silently nothing."""

import pytest

from tekoa.store import errors, names, walkback


def fill(directory, *steps):
    for step in steps:
        names.step_dir(directory, step).mkdir()


def damaged(*bad):
    def use(path):
        step = names.parse_step(path.name)
        if step in bad:
            raise errors.DamagedError(f"{path}: bad")
        return step

    return use


def test_newest_that_works_is_used_and_skips_are_told(tmp_path, caplog):
    fill(tmp_path, 1, 9, 10, 11)
    found = walkback.newest_usable(tmp_path, damaged(11, 10))
    assert (found.value, found.step) == (9, 9)
    assert [skip.step for skip in found.skipped] == [11, 10]
    assert caplog.text.count("skipped step") == 2


def test_no_step_at_all_is_none(tmp_path):
    assert walkback.newest_usable(tmp_path, damaged()) is None
    assert walkback.newest_usable(tmp_path / "missing", damaged()) is None


def test_only_damaged_steps_are_an_error(tmp_path):
    fill(tmp_path, 1, 2)
    with pytest.raises(errors.NothingUsableError, match=r"(?s)step 2.*step 1.*empty directory"):
        walkback.newest_usable(tmp_path, damaged(1, 2))


def test_other_errors_are_not_walked_over(tmp_path):
    fill(tmp_path, 1, 2)

    def use(path):
        raise errors.MismatchError("does not fit")

    with pytest.raises(errors.MismatchError):
        walkback.newest_usable(tmp_path, use)


def test_step_that_vanishes_is_not_counted_as_damaged(tmp_path):
    fill(tmp_path, 1)

    def use(path):
        if path.name == "checkpoint_1":
            path.rmdir()
            fill(tmp_path, 2)
            raise FileNotFoundError(path)
        return "read"

    found = walkback.newest_usable(tmp_path, use)
    assert (found.value, found.step, found.skipped) == ("read", 2, [])


def test_steps_that_vanish_for_ever_are_an_error(tmp_path):
    fill(tmp_path, 1)

    def use(path):
        path.rmdir()
        fill(tmp_path, names.parse_step(path.name) + 1)
        raise FileNotFoundError(path)

    with pytest.raises(errors.StepGoneError, match="pins"):
        walkback.newest_usable(tmp_path, use)
