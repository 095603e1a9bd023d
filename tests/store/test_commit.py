"""Commits: whole or not there, synced in order, fenced."""

import os
import shutil
import subprocess
import sys

import pytest

from tekoa.store import commit, errors, lease, manifest, names


@pytest.fixture
def held(tmp_path):
    with lease.held(tmp_path / "run") as held:
        yield held


def write(directory):
    (directory / "sub").mkdir()
    (directory / "sub" / "data").write_bytes(b"123")


def test_committed_step_has_a_manifest_of_its_files(held):
    path = commit.commit(held, 3, write, layout="tekoa", facts={"a": 1})
    sealed = manifest.read(path)
    assert (sealed.step, sealed.layout, sealed.facts) == (3, "tekoa", {"a": 1})
    # CRC-32 of b'123' as published check values give it.
    assert sealed.files == {"sub/data": (3, 0x884863D2)}


def test_failed_write_leaves_nothing(held):
    def fail(directory):
        write(directory)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        commit.commit(held, 3, fail, layout="tekoa")
    assert os.listdir(held.directory) == [lease.NAME]


def test_existing_step_is_not_overwritten(held):
    commit.commit(held, 3, write, layout="tekoa")
    with pytest.raises(errors.StoreError, match="never overwritten"):
        commit.commit(held, 3, lambda directory: None, layout="tekoa")
    assert (names.step_dir(held.directory, 3) / "sub" / "data").exists()


def test_lost_lease_forbids_every_change(held):
    commit.commit(held, 3, write, layout="tekoa")

    def lose(directory):
        write(directory)
        lease.break_lease(held.directory)

    with pytest.raises(errors.FencedError, match="lost its lease"):
        commit.commit(held, 4, lose, layout="tekoa")
    for change in (commit.remove, commit.quarantine):
        with pytest.raises(errors.FencedError):
            change(held, 3)
    assert os.listdir(held.directory) == ["checkpoint_3"]


def test_removed_step_leaves_nothing(held):
    commit.commit(held, 3, write, layout="tekoa")
    commit.remove(held, 3)
    commit.remove(held, 3)
    assert os.listdir(held.directory) == [lease.NAME]


def test_quarantine_keeps_the_bytes(held):
    commit.commit(held, 3, write, layout="tekoa")
    bad = commit.quarantine(held, 3)
    assert (bad / "sub" / "data").read_bytes() == b"123"
    assert names.list_steps(held.directory) == []


def test_sweep_removes_our_leftovers_and_nothing_else(held):
    ours = [names.tmp_dir(held.directory, 1), names.trash_dir(held.directory)]
    others = [held.directory / "checkpoint_2.tmp-1700000000", names.bad_dir(held.directory, 1)]
    for path in ours + others:
        path.mkdir()
        write(path)
    commit.sweep(held)
    assert [path.exists() for path in ours + others] == [False, False, True, True]


PROGRAM = """
import sys
from tekoa.store import commit, lease
held, _ = lease.acquire(sys.argv[1])
def write(directory):
    (directory / "sub").mkdir()
    (directory / "sub" / "data").write_bytes(b"123")
commit.commit(held, 3, write, layout="tekoa")
"""


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, to see the order of calls")
def test_everything_is_synced_before_the_rename_and_the_parent_after(tmp_path):
    log = tmp_path / "log"
    calls = "trace=fsync,rename,openat,close"
    command = ["strace", "-f", "-y", "-qq", "-e", calls, "-o", log, sys.executable, "-c", PROGRAM]
    subprocess.run([*command, tmp_path / "run"], check=True)
    lines = [line for line in log.read_text().splitlines() if "fsync" in line or "rename(" in line]
    (at,) = [i for i, line in enumerate(lines) if "checkpoint_3.tmp-" in line and "rename(" in line]
    synced = [line.partition("checkpoint_3.tmp-")[2][32:].partition(">")[0] for line in lines[:at]]
    assert {"/sub/data", "/sub", "/tekoa.manifest", ""} <= set(synced)
    assert synced.index("/sub/data") < synced.index("/tekoa.manifest")
    assert "fsync" in lines[at + 1]
    assert "run>" in lines[at + 1]


def test_meta_hash_depends_on_values_not_on_order():
    assert commit.meta_hash({"a": 1, "b": 2}) == commit.meta_hash({"b": 2, "a": 1})
    assert commit.meta_hash({"a": 1}) != commit.meta_hash({"a": 2})
