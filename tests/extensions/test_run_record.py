import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from tekoa.extensions import run_record


def git(directory, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_every_start_is_kept(tmp_path):
    for rate, step in ((1.0, 0), (1.0, 10), (5.0, 20)):
        run_record.write_start(tmp_path, {"settings": {"rate": rate}, "model": "m"}, step=step)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["settings"] == {"rate": 5.0}
    first, second, third = record["starts"]
    assert [start["step"] for start in record["starts"]] == [0, 10, 20]
    assert first["settings"] == {"rate": 1.0}
    assert first["model"] == "m"
    assert sorted(second) == ["command", "id", "step", "time"]
    assert third["settings"] == {"rate": 5.0}
    assert "model" not in third


def test_a_record_of_an_earlier_version_becomes_the_first_start(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"random_seed": 3, "settings": {"rate": 1}}))
    before, after = run_record.write_start(tmp_path, {"settings": {"rate": 2}}, step=7)
    assert run_record.changes(before, after) == ["rate: 1 -> 2"]
    assert run_record.read(tmp_path / "run.json")["starts"][0] == {
        "random_seed": 3,
        "settings": {"rate": 1},
    }


def test_changes_are_named_as_the_user_sets_them():
    before = {
        "settings": {"opt": {"rate": 1.0}, "gone": 1},
        "flags": {"max_ckpt": 10, "old_flag": 1},
        "versions": {"jax": "1.0", "matplotlib": "3"},
    }
    after = {
        "settings": {"opt": {"rate": 5.0}, "new": True},
        "flags": {"max_ckpt": 2, "new_flag": 1},
        "versions": {"jax": "1.1"},
    }
    assert run_record.changes(before, after) == [
        "opt.rate: 1.0 -> 5.0",
        "gone: 1 -> not set",
        "new: not set -> True",
        "--max_ckpt: 10 -> 2",
        "jax: 1.0 -> 1.1",
    ]


def test_versions_of_all_loaded_packages_are_recorded():
    versions = run_record.versions()
    for name in ("jax", "flax", "optax", "numpy", "pytest"):
        assert versions[name] == importlib.metadata.version(name)
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "os" not in versions


def test_commit_and_changed_files_are_recorded(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert run_record.git_state(tmp_path) == {"commit": commit, "is_dirty": False}
    file.write_text("a = 2\n")
    assert run_record.git_state(tmp_path) == {"commit": commit, "is_dirty": True}


@pytest.mark.parametrize("has_git", [True, False])
def test_there_may_be_no_repository_and_no_git(tmp_path, monkeypatch, has_git):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    if not has_git:
        monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert run_record.git_state(tmp_path) == {}


def test_each_version_of_a_source_file_is_copied_once(tmp_path):
    file, run_dir = tmp_path / "model.py", tmp_path / "run"
    run_dir.mkdir()
    for text in ("a = 1\n", "a = 1\n", "a = 2\n"):
        file.write_text(text)
        run_record.write_start(run_dir, {}, step=0, sources=[file])
    copies = sorted((run_dir / "source").iterdir(), key=lambda path: path.read_text())
    assert [path.read_text() for path in copies] == ["a = 1\n", "a = 2\n"]
    assert run_record.read(run_dir / "run.json")["sources"] == {str(file): copies[1].name}
