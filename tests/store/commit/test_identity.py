"""Identities of commits: what they are, who has the same one, and what earlier versions wrote."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import identity
from tekoa.store.transfer import copy


def save(directory, step, value, **options):
    with store.Store(directory, keep=[store.KeepEvery(1)]) as writer:
        writer.save(step, {"x": np.full(2, value)}, **options)
    return directory / f"checkpoint_{step}"


def value_of(path):
    return store.load(path)["x"][0]


def test_digest_is_the_sha256_of_the_manifest_file(tmp_path):
    path = save(tmp_path, 3, 1.0)
    expected = hashlib.sha256((path / "tekoa.manifest").read_bytes()).hexdigest()
    assert store.commit_id(path).digest == expected
    assert store.restore(tmp_path, {"x": np.zeros(2)}).commit == store.commit_id(path)


def test_all_commits_of_one_process_have_its_start_and_those_of_another_do_not(tmp_path):
    paths = [save(tmp_path / name, 3, 1.0) for name in "ab"]
    program = (
        "import numpy, sys; from tekoa import store\n"
        "with store.Store(sys.argv[1]) as s: s.save(3, {'x': numpy.full(2, 1.0)})"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "c"], check=True, timeout=60)
    other = store.commit_id(tmp_path / "c" / "checkpoint_3")
    assert {store.commit_id(path).start for path in paths} == {identity.start_id()}
    assert other.start not in ("", identity.start_id())
    assert other.digest != store.commit_id(paths[0]).digest  # Of the same values.


def test_forked_child_is_a_start_of_its_own():
    program = (
        "import os; from tekoa.store.commit.identity import start_id\n"
        "start_id(); os.fork(); os.write(1, f'{start_id()} '.encode())"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    assert len(set(output.split())) == 2


def test_commits_after_a_restore_name_their_parent(tmp_path):
    first = store.commit_id(save(tmp_path, 1, 1.0))
    assert first.parent == ""
    with store.Store(tmp_path, keep=[store.KeepEvery(1)]) as writer:
        writer.restore({"x": np.zeros(2)})
        for step in (2, 3):
            writer.save(step, {"x": np.zeros(2)})
    parents = {store.commit_id(tmp_path / f"checkpoint_{step}").parent for step in (2, 3)}
    assert parents == {first.digest}


def test_step_of_an_earlier_version_has_a_digest_alone(tmp_path):
    path = save(tmp_path, 3, 1.0)
    body = json.loads((path / "tekoa.manifest").read_text().splitlines()[0])
    text = json.dumps({**body, "facts": {"meta_hash": "bf21a9e8"}}).encode()
    (path / "tekoa.manifest").write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
    digest = hashlib.sha256((path / "tekoa.manifest").read_bytes()).hexdigest()
    assert store.commit_id(path) == store.CommitId(digest=digest)
    assert value_of(path) == 1.0


def test_copy_has_the_identity_of_the_original(tmp_path):
    path = save(tmp_path / "run", 3, 1.0)
    (path / "PINNED").touch()
    copied = copy.copy_step(path, tmp_path / "best")
    assert store.commit_id(copied) == store.commit_id(path)
    assert not (copied / "PINNED").exists()


def test_step_without_a_manifest_has_the_identity_of_its_copy(golden, tmp_path):
    (source,) = (golden / "ts_amos").glob("checkpoint_*")
    shutil.copytree(source, tmp_path / source.name)
    copied = copy.copy_step(tmp_path / source.name, tmp_path / "best")
    before = store.commit_id(tmp_path / source.name)
    assert store.commit_id(copied) == before
    (tmp_path / source.name / "PINNED").touch()
    assert store.commit_id(tmp_path / source.name) == before
    with (tmp_path / source.name / "checkpoint").open("ab") as file:
        file.write(b"\0")
    assert store.commit_id(tmp_path / source.name) != before


def test_copy_of_another_history_replaces_the_copy_with_the_same_number(tmp_path):
    old = copy.copy_step(save(tmp_path / "run", 3, 1.0), tmp_path / "best")
    new = copy.copy_step(save(tmp_path / "other", 3, 2.0), tmp_path / "best")
    assert (old, value_of(new)) == (new, 2.0)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["checkpoint_3"]


def test_resumed_run_replaces_the_steps_of_the_history_it_leaves(tmp_path):
    parent = store.commit_id(save(tmp_path, 1, 1.0)).digest
    save(tmp_path, 2, 1.0)
    path = save(tmp_path, 2, 5.0, exist_ok=True, parent=parent)
    assert (value_of(path), store.commit_id(path).parent) == (5.0, parent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "checkpoint_2"]


def test_resumed_run_keeps_the_step_that_it_resumed_from(tmp_path):
    before = store.commit_id(save(tmp_path, 1, 1.0))
    save(tmp_path, 1, 5.0, exist_ok=True, parent=before.digest)
    assert store.commit_id(tmp_path / "checkpoint_1") == before


def test_run_from_scratch_keeps_steps_of_others_and_says_that_it_does_not_save(tmp_path, caplog):
    before, committed = store.commit_id(save(tmp_path, 1, 1.0)), []
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 1, 5.0, exist_ok=True, on_commit=committed.append)
    assert store.commit_id(tmp_path / "checkpoint_1") == before
    assert "checkpoint_1: was saved by an earlier run" in caplog.text
    assert committed == []


def test_step_of_the_same_store_is_replaced_if_requested(tmp_path):
    with store.Store(tmp_path) as writer:
        for value in (1.0, 2.0):
            writer.save(4, {"x": np.full(2, value)}, replace=True)
    assert value_of(tmp_path / "checkpoint_4") == 2.0


def test_foreign_directory_is_set_aside_and_not_deleted_by_a_replacement(tmp_path):
    (tmp_path / "checkpoint_4").mkdir()
    (tmp_path / "checkpoint_4" / "mine").write_text("keep")
    save(tmp_path, 4, 2.0, replace=True)
    assert [path.read_text() for path in tmp_path.glob("checkpoint_4.bad-*/mine")] == ["keep"]


def test_damaged_manifest_has_no_identity(tmp_path):
    path = save(tmp_path, 3, 1.0)
    (path / "tekoa.manifest").write_bytes(b"{}")
    with pytest.raises(errors.DamagedError, match="checksum"):
        store.commit_id(path)
    with pytest.raises(FileNotFoundError):
        store.commit_id(tmp_path / "checkpoint_9")
