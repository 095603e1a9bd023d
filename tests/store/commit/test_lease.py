"""The lease: one process per directory; taken over only if its owner is gone."""

import json
import os
import subprocess
import sys
import time

import pytest

from tekoa.store import errors
from tekoa.store.commit import lease


def owner(directory):
    return json.loads((directory / lease.NAME).read_text())


def write_owner(directory, **changes):
    directory.mkdir(exist_ok=True)
    held, _ = lease.acquire(directory)
    facts = owner(held.directory)
    held.release()
    (directory / lease.NAME).write_text(json.dumps({**facts, "token": "other", **changes}))


def test_one_process_may_hold_a_directory_twice(tmp_path):
    first, is_first_new = lease.acquire(tmp_path)
    second, is_second_new = lease.acquire(tmp_path)
    assert (first is second, is_first_new, is_second_new) == (True, True, False)
    first.release()
    assert (tmp_path / lease.NAME).exists()
    second.release()
    assert os.listdir(tmp_path) == []


def test_lease_of_a_living_process_is_respected(tmp_path):
    write_owner(tmp_path, pid=os.getppid(), start=lease._process(os.getppid())[0])
    with pytest.raises(errors.LeaseHeldError, match=f"process {os.getppid()} on "):
        lease.acquire(tmp_path)


def test_lease_of_a_dead_process_is_taken_over(tmp_path, caplog):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    write_owner(tmp_path, pid=process.pid)
    held, _ = lease.acquire(tmp_path)
    assert owner(tmp_path)["pid"] == os.getpid()
    assert f"took over the lease of process {process.pid}" in caplog.text
    held.release()


def test_reused_pid_does_not_keep_the_lease(tmp_path):
    write_owner(tmp_path, pid=os.getppid(), start="1")
    lease.acquire(tmp_path)[0].release()


def test_zombie_process_counts_as_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_owner(tmp_path, pid=process.pid, start=lease._process(process.pid)[0])
    process.stdin.close()
    while not lease._process(process.pid)[1]:
        time.sleep(0.01)
    lease.acquire(tmp_path)[0].release()
    process.wait()


def test_lease_of_another_host_is_respected_while_it_is_renewed(tmp_path, monkeypatch):
    write_owner(tmp_path, host="elsewhere", count=1)
    monkeypatch.setattr(lease.time, "sleep", lambda _: renew(tmp_path))
    with pytest.raises(errors.LeaseHeldError, match="elsewhere"):
        lease.acquire(tmp_path)


def renew(directory):
    facts = owner(directory)
    (directory / lease.NAME).write_text(json.dumps({**facts, "count": facts["count"] + 1}))


def test_lease_of_another_host_without_renewals_is_taken_over(tmp_path, monkeypatch):
    write_owner(tmp_path, host="elsewhere")
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    started = time.monotonic()
    lease.acquire(tmp_path)[0].release()
    assert time.monotonic() - started > 0.3


def test_own_lease_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    held, _ = lease.acquire(tmp_path)
    deadline = time.monotonic() + 5
    while owner(tmp_path)["count"] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner(tmp_path)["count"] >= 2
    with held.fence():
        pass
    held.release()


def test_fence_raises_when_the_lease_was_broken_or_taken_over(tmp_path):
    held, _ = lease.acquire(tmp_path)
    facts = owner(tmp_path)
    (tmp_path / lease.NAME).write_text(json.dumps({**facts, "token": "other", "host": "x"}))
    with (
        pytest.raises(errors.FencedError, match=r"lost its lease to process \d+ on x"),
        held.fence(),
    ):
        pass
    held.release()
    assert owner(tmp_path)["token"] == "other"
    assert lease.break_lease(tmp_path)
    assert not lease.break_lease(tmp_path)


def test_unreadable_lease_does_not_count_as_a_free_directory(tmp_path, monkeypatch):
    (tmp_path / lease.NAME).write_text("?")
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    started = time.monotonic()
    lease.acquire(tmp_path)[0].release()
    assert time.monotonic() - started > 0.1
