"""The lease: one process per directory; taken over only if its owner is gone."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import lease, paths


def owner(directory):
    return json.loads((directory / lease.NAME).read_text())


def write_owner(directory, **changes):
    directory.mkdir(exist_ok=True)
    held = lease.acquire(directory)
    facts = owner(held.directory)
    held.release()
    (directory / lease.NAME).write_text(json.dumps({**facts, "token": "other", **changes}))


def test_one_process_may_hold_a_directory_twice(tmp_path):
    first, second = lease.acquire(tmp_path), lease.acquire(tmp_path)
    assert first is second
    first.release()
    assert (tmp_path / lease.NAME).exists()
    second.release()
    assert os.listdir(tmp_path) == []


def test_lease_of_a_living_process_is_respected(tmp_path):
    write_owner(tmp_path, pid=os.getppid(), start=lease._process(os.getppid())[0])
    with pytest.raises(errors.LeaseHeldError, match=f"process {os.getppid()} on "):
        lease.acquire(tmp_path)


@pytest.mark.parametrize(
    ("group", "start", "expected"),
    [("node0:9000", None, True), ("node0:9001", None, False), ("node0:9000", "1", False)],
    ids=["alive", "other group", "dead"],
)
def test_is_held_by_asks_for_a_living_process_of_a_group(tmp_path, group, start, expected):
    assert not lease.is_held_by(tmp_path, group)
    start = start or lease._process(os.getppid())[0]
    write_owner(tmp_path, group="node0:9000", pid=os.getppid(), start=start)
    assert lease.is_held_by(tmp_path, group) is expected


@pytest.mark.parametrize("is_renewed", [True, False])
def test_on_another_machine_a_lease_is_held_if_it_is_renewed(tmp_path, monkeypatch, is_renewed):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 5.0 if is_renewed else 0.05)
    write_owner(tmp_path, host="node1", group="node0:9000")
    seen = []

    def renew(path, read=lease._read):
        seen.append(path)
        if is_renewed and len(seen) == 2:
            write_owner(tmp_path / "next", host="node1", group="node0:9000", count=1)
            os.replace(tmp_path / "next" / lease.NAME, path)
        return read(path)

    monkeypatch.setattr(lease, "_read", renew)
    assert lease.is_held_by(tmp_path, "node0:9000") is is_renewed


def test_lease_of_a_dead_process_is_taken_over(tmp_path, caplog):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    write_owner(tmp_path, pid=process.pid)
    held = lease.acquire(tmp_path)
    assert owner(tmp_path)["pid"] == os.getpid()
    assert f"the lease of process {process.pid} on " in caplog.text
    held.release()


def test_reused_pid_does_not_keep_the_lease(tmp_path):
    write_owner(tmp_path, pid=os.getppid(), start="1")
    lease.acquire(tmp_path).release()


def test_zombie_process_counts_as_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_owner(tmp_path, pid=process.pid, start=lease._process(process.pid)[0])
    process.stdin.close()
    while not lease._process(process.pid)[1]:
        time.sleep(0.01)
    lease.acquire(tmp_path).release()
    process.wait()


def test_lease_of_another_host_is_respected_while_it_is_renewed(tmp_path, monkeypatch):
    write_owner(tmp_path, host="elsewhere", count=1)
    monkeypatch.setattr(lease.time, "sleep", lambda _: renew(tmp_path))
    with pytest.raises(errors.LeaseHeldError, match="elsewhere"):
        lease.acquire(tmp_path)


def renew(directory):
    facts = owner(directory)
    (directory / lease.NAME).write_text(json.dumps({**facts, "count": facts["count"] + 1}))


def test_lease_of_another_host_without_renewals_is_taken_over(tmp_path, monkeypatch, caplog):
    write_owner(tmp_path, host="elsewhere")
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    started = time.monotonic()
    lease.acquire(tmp_path).release()
    assert time.monotonic() - started > 0.3
    waits, takes = caplog.messages
    assert "in case process" in waits
    assert "on elsewhere still writes here" in waits
    assert "has expired" in takes


def test_own_lease_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    held = lease.acquire(tmp_path)
    deadline = time.monotonic() + 60
    while owner(tmp_path)["count"] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner(tmp_path)["count"] >= 2
    with held.fence():
        pass
    held.release()


def test_fence_raises_when_the_lease_was_broken_or_taken_over(tmp_path):
    held = lease.acquire(tmp_path)
    facts = owner(tmp_path)
    (tmp_path / lease.NAME).write_text(json.dumps({**facts, "token": "other", "host": "x"}))
    with (
        pytest.raises(errors.FencedError, match=r"lost its lease to process \d+ on x"),
        held.fence(),
    ):
        pass
    held.release()
    assert owner(tmp_path)["token"] == "other"


def test_unreadable_lease_does_not_count_as_a_free_directory(tmp_path, monkeypatch):
    (tmp_path / lease.NAME).write_text("?")
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    started = time.monotonic()
    lease.acquire(tmp_path).release()
    assert time.monotonic() - started > 0.1


def test_pid_that_another_user_has_now_does_not_keep_the_lease(tmp_path, monkeypatch):
    write_owner(tmp_path, pid=os.getppid(), start="1")
    monkeypatch.setattr(os, "kill", refuse)
    lease.acquire(tmp_path).release()


def test_living_process_of_another_user_is_respected(tmp_path, monkeypatch):
    write_owner(tmp_path, pid=os.getppid(), start=lease._process(os.getppid())[0])
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(errors.LeaseHeldError, match=f"process {os.getppid()} on "):
        lease.acquire(tmp_path)


def refuse(pid, number):
    raise PermissionError(1, "Operation not permitted")


def test_process_that_is_hidden_counts_as_alive_only_while_it_renews(tmp_path, monkeypatch):
    write_owner(tmp_path, pid=os.getppid(), start="1")
    monkeypatch.setattr(lease, "_process", lambda pid: ("", False))
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    started = time.monotonic()
    lease.acquire(tmp_path).release()
    assert time.monotonic() - started > 0.3


@pytest.mark.parametrize("pid", [0, -1, 2**40, "7", None])
def test_impossible_pid_in_a_lease_is_not_signalled(tmp_path, monkeypatch, pid):
    write_owner(tmp_path, pid=pid)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail(f"kill({pid}, {number})"))
    lease.acquire(tmp_path).release()


def test_lease_file_that_could_not_be_removed_does_not_block_its_own_process(tmp_path):
    held = lease.acquire(tmp_path)
    text = (tmp_path / lease.NAME).read_text()
    held.release()
    (tmp_path / lease.NAME).write_text(text)
    lease.acquire(tmp_path).release()


def test_one_thread_renews_all_leases(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    leases = [lease.acquire(tmp_path / str(i)) for i in range(5)]
    deadline = time.monotonic() + 60
    while min(owner(held.directory)["count"] for held in leases) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [thread.name for thread in threading.enumerate()].count("tekoa-lease") == 1
    for held in leases:
        held.release()


def test_renewals_are_not_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("fsync"))
    held = lease.acquire(tmp_path)
    held._renew()
    assert owner(tmp_path)["count"] >= 1  # The thread may have renewed it too.
    held.release()


def test_threads_of_one_process_wait_for_each_other_without_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_LOCK_SECONDS", 0.05)
    held = lease.acquire(tmp_path)
    is_inside, gate = threading.Event(), threading.Event()

    def stay():
        with held.fence():
            is_inside.set()
            gate.wait(60)

    other = threading.Thread(target=stay)
    other.start()
    is_inside.wait(60)
    threading.Timer(0.3, gate.set).start()
    with held.fence():
        assert gate.is_set()
    other.join()
    held.release()


def test_release_is_bounded_while_another_thread_is_stuck_in_the_fence(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_LOCK_SECONDS", 0.05)
    held = lease.acquire(tmp_path)
    held._lock.acquire()
    worker = threading.Thread(target=held.release)
    worker.start()
    worker.join(60)
    assert not worker.is_alive()
    held._lock.release()
    assert (tmp_path / lease.NAME).exists()
    lease.acquire(tmp_path).release()


def test_unfinished_steps_are_removed_when_the_lease_is_new_and_nothing_else(tmp_path):
    tmp, trash, bad = (paths.new_dir(tmp_path, 1, kind) for kind in ("tmp", "trash", "bad"))
    ours, others = [tmp, trash], [tmp_path / "checkpoint_2.tmp-1700000000", bad]
    for path in ours + others:
        path.mkdir()
        (path / "data").write_bytes(b"123")
    with lease.held(tmp_path):
        assert [path.exists() for path in ours + others] == [False, False, True, True]
        tmp.mkdir()  # Of a save that runs.
        with lease.held(tmp_path):
            assert tmp.exists()


def test_leftovers_of_killed_renewals_are_swept_and_foreign_files_are_not(tmp_path):
    ours = tmp_path / f".writer.lease.{'0a' * 16}"
    foreign = [tmp_path / ".writer.lease.backup", tmp_path / f".other.{'0a' * 16}"]
    for path in (ours, *foreign):
        path.write_text("{}")
    (tmp_path / "target").write_text("keep")
    link = tmp_path / f".writer.lease.{'1b' * 16}"
    link.symlink_to(tmp_path / "target")
    store.Store(tmp_path).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"target", link.name, *(path.name for path in foreign)}
