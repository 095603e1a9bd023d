"""What a sweep remembers besides its runs."""

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.sweep.record import FILE_NAME, SweepRecord, rungs


def test_record_is_read_back(tmp_path):
    record = SweepRecord.read(tmp_path / "new")
    assert record.stopped == {}
    record.stopped["rate=1"] = "NaN or Inf at step 3"
    record.halved.append(10)
    record.write()
    assert SweepRecord.read(tmp_path / "new") == record


def test_what_a_killed_write_left_is_removed_and_nothing_else(tmp_path):
    others = [".sweep.json.note", "sweep.json", ".other.json." + "0" * 32]
    for name in [*others, ".sweep.json." + "0a" * 16]:
        (tmp_path / name).touch()
    SweepRecord(directory=tmp_path).remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stopped": [], "halved": []}'])
def test_damaged_record_is_reported(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(UsageError, match="Remove it"):
        SweepRecord.read(tmp_path)


def test_half_of_the_lanes_go_on():
    assert rungs(16, 1600, 100) == {100: 8, 200: 4, 400: 2, 800: 1}
    assert rungs(3, 10, 4) == {4: 1, 8: 1}
    assert rungs(2, 10, 10) == {}
