import json

import pytest

from support import hostile
from tekoa.estimator.run import run_files
from tekoa.store import errors


def test_missing_files_are_empty(tmp_path):
    assert run_files.read_facts(tmp_path) == {}
    assert run_files.last_step(tmp_path) is None


def test_files_are_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"random_seed": 3}))
    (tmp_path / "train_end.json").write_text(json.dumps({"step": 0}))
    assert run_files.read_facts(tmp_path) == {"random_seed": 3}
    assert run_files.last_step(tmp_path) == 0


DAMAGE = {
    **{name: lambda path, text=text: path.write_bytes(text) for name, text in hostile.JSON.items()},
    **hostile.IRREGULAR,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "huge": hostile.sparse,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", ["run.json", "train_end.json"])
def test_damaged_files_are_reported_in_one_line(tmp_path, name, damage):
    damage(tmp_path / name)
    read = run_files.read_facts if name == "run.json" else run_files.last_step
    with pytest.raises(errors.DamagedError, match=rf"{name}: is damaged: [^\n]*\.$") as raised:
        read(tmp_path)
    assert "root:" not in str(raised.value)
