import pytest

from tekoa.store import errors
from tekoa.store.read import json_lines


def test_texts_are_by_step_and_name(tmp_path):
    assert json_lines.read_texts(tmp_path) == {}
    lines = '{"step": 0, "sample": "a", "other": "b"}\n{"step": 5, "sample": "c\\n"}\n{"step": 9'
    (tmp_path / "texts.jsonl").write_text(lines)
    # The last line was cut off by a kill.
    assert json_lines.read_texts(tmp_path) == {
        0: {"sample": "a", "other": "b"},
        5: {"sample": "c\n"},
    }


def test_a_file_of_another_program_is_refused(tmp_path):
    (tmp_path / "texts.jsonl").write_text("Dear diary\nhow are you\n")
    with pytest.raises(errors.DamagedError, match=r"line 1, is not a JSON object with a 'step'"):
        json_lines.read_texts(tmp_path)
