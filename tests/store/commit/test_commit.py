"""Commits: complete or absent, synced in order, fenced, by one process or several."""

import os
import shutil
import subprocess
import sys

import pytest

from tekoa.store import errors
from tekoa.store.commit import commit, durable, lease, manifest, paths


@pytest.fixture
def held(tmp_path):
    with lease.held(tmp_path / "run") as held:
        yield held


def write(directory):
    (directory / "sub").mkdir()
    (directory / "sub" / "data").write_bytes(b"123")


def test_committed_step_has_a_manifest_of_its_files(held):
    path = commit.commit(held, 3, write, format="native", facts={"a": 1})
    sealed = manifest.read(path)
    assert (sealed.step, sealed.format, sealed.facts) == (3, "native", {"a": 1})
    # CRC-32 of b'123', a published check value.
    assert sealed.files == {"sub/data": (3, 0x884863D2)}


def test_failed_write_leaves_nothing(held):
    def fail(directory):
        write(directory)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        commit.commit(held, 3, fail, format="native")
    assert os.listdir(held.directory) == [lease.NAME]


def test_existing_step_is_not_overwritten(held):
    commit.commit(held, 3, write, format="native")
    with pytest.raises(errors.StoreError, match="not overwritten"):
        commit.commit(held, 3, lambda directory: None, format="native")
    assert (paths.step_dir(held.directory, 3) / "sub" / "data").exists()


def test_lost_lease_prevents_every_change(held):
    commit.commit(held, 3, write, format="native")

    def lose(directory):
        write(directory)
        (held.directory / lease.NAME).unlink()

    with pytest.raises(errors.FencedError, match="lost its lease"):
        commit.commit(held, 4, lose, format="native")
    for change in (commit.remove, commit.quarantine):
        with pytest.raises(errors.FencedError):
            change(held, 3)
    with pytest.raises(errors.FencedError):
        commit.set_aside(held, [3])
    assert os.listdir(held.directory) == ["checkpoint_3"]


def test_removed_step_leaves_nothing(held):
    commit.commit(held, 3, write, format="native")
    commit.remove(held, 3)
    commit.remove(held, 3)
    assert os.listdir(held.directory) == [lease.NAME]


def test_quarantine_keeps_the_bytes(held):
    commit.commit(held, 3, write, format="native")
    bad = commit.quarantine(held, 3)
    assert (bad / "sub" / "data").read_bytes() == b"123"
    assert paths.list_steps(held.directory) == []


def test_steps_that_are_set_aside_keep_their_bytes_and_never_replace_others(held):
    for _ in range(2):
        for step in (2, 3, 4):
            commit.commit(held, step, write, format="native")
        aside = commit.set_aside(held, [3, 4])
        assert paths.list_steps(held.directory) == [2]
        assert paths.list_steps(aside) == [3, 4]
        assert (paths.step_dir(aside, 4) / "sub" / "data").read_bytes() == b"123"
        commit.remove(held, 2)
    assert {path.name for path in held.directory.glob("set*")} == {"set_aside-4", "set_aside-4-2"}


def test_steps_are_set_aside_lowest_first(held, monkeypatch):
    for step in (3, 4):
        commit.commit(held, step, write, format="native")
    rename = os.rename

    def fail_at_4(source, target):
        if source == paths.step_dir(held.directory, 4):
            raise OSError("killed")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail_at_4)
        with pytest.raises(OSError, match="killed"):
            commit.set_aside(held, [3, 4])
    # The run is not rewound yet: its newest step is still there.
    assert paths.list_steps(held.directory) == [4]
    assert paths.list_steps(commit.set_aside(held, [4])) == [3, 4]


PROGRAM = """
import sys
from tekoa.store.commit import commit, lease
held = lease.acquire(sys.argv[1])
def write(directory):
    (directory / "sub").mkdir()
    (directory / "sub" / "data").write_bytes(b"123")
commit.commit(held, 3, write, format="native")
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


def commit_together(group, held, write, finish=lambda tmp: None):
    lease_of_writer = held if group.is_writer else None
    path = commit.commit(lease_of_writer, 3, write, finish=finish, format="native", group=group)
    assert path == paths.step_dir(held.directory, 3)


def write_share(group, error=None):
    def write(tmp):
        folder = tmp / "default" / f"process_{group.index}"
        folder.mkdir(parents=True)
        (folder / "d").write_bytes(b"123")
        if error and group.index == 1:
            raise error
        return [f"default/process_{group.index}/d"]

    return write


def test_a_step_of_two_processes_has_one_manifest_of_all_files(on_each, held):
    outcomes = on_each(lambda group: commit_together(group, held, write_share(group)))
    assert outcomes == [None, None]
    sealed = manifest.read(paths.step_dir(held.directory, 3))
    # CRC-32 of b'123', a published check value.
    expected = (3, 0x884863D2)
    assert sealed.files == {f"default/process_{i}/d": expected for i in range(2)}


def test_each_process_checksums_the_files_it_reports(on_each, held, monkeypatch):
    checked = []
    checksum = durable.checksum

    def record(path, *, sync=False):
        checked.append((path.parent.name, sync))
        return checksum(path, sync=sync)

    monkeypatch.setattr(durable, "checksum", record)
    on_each(lambda group: commit_together(group, held, write_share(group)))
    assert sorted(checked) == [("process_0", True), ("process_1", True)]


def test_a_failed_share_leaves_nothing(on_each, held):
    error = OSError("disk full")
    first, second = on_each(lambda group: commit_together(group, held, write_share(group, error)))
    assert "failed on process 1: OSError: disk full" in str(first)
    assert isinstance(second, OSError)
    assert os.listdir(held.directory) == [lease.NAME]


def test_a_failed_commit_raises_on_all_processes_and_leaves_nothing(on_each, held):
    def finish(tmp):
        (held.directory / lease.NAME).unlink()

    failures = on_each(lambda group: commit_together(group, held, write_share(group), finish))
    assert [type(error) for error in failures] == [errors.FencedError] * 2
    assert os.listdir(held.directory) == []
