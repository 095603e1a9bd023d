import json
import os

import pytest

from tekoa.store import errors
from tekoa.store.commit import lease
from tekoa.store.mirror import remote_lease, versions
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.remote_lease import NAME, RemoteLease
from tekoa.store.mirror.versions import ABSENT


def write_owner(url, **changes):
    owner = {**lease.identity(os.getppid()), "token": "other", "count": 3, **changes}
    Objects(url).put(NAME, json.dumps(owner).encode(), replaces=ABSENT)


def test_a_living_writer_is_named(url):
    write_owner(url)
    with pytest.raises(errors.LeaseHeldError, match=rf"process {os.getppid()} on .*tekoa\.writer"):
        RemoteLease(Objects(url))


def test_a_dead_writer_is_replaced_at_once(url):
    write_owner(url, start="long ago")
    held = RemoteLease(Objects(url))
    held.check()
    held.release()
    RemoteLease(Objects(url)).release()


def test_a_writer_of_another_machine_is_replaced_once_it_is_silent(url, monkeypatch):
    write_owner(url, host="elsewhere")
    monkeypatch.setattr(remote_lease, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(remote_lease, "_POLL_SECONDS", 0.05)
    RemoteLease(Objects(url)).release()


def test_a_writer_of_another_machine_that_renews_is_not_replaced(url, monkeypatch):
    write_owner(url, host="elsewhere")

    def renew(seconds):
        data, version = Objects(url).read(NAME)
        owner = json.loads(data)
        owner["count"] += 1
        Objects(url).put(NAME, json.dumps(owner).encode(), replaces=version)

    monkeypatch.setattr(remote_lease.time, "sleep", renew)
    with pytest.raises(errors.LeaseHeldError, match="on elsewhere"):
        RemoteLease(Objects(url))


def test_of_two_that_wait_for_a_silent_writer_one_takes_over(url, monkeypatch):
    """The other process is faster by a moment, and renews the lease as every writer does."""
    write_owner(url, host="elsewhere")
    faster = {**lease.identity(1), "host": "third", "token": "faster", "count": 0}
    put, versions, clock = Objects.put, [], [0.0]

    def put_second(self, path, data, *, replaces):
        if not versions:
            versions.append(put(self, path, json.dumps(faster).encode(), replaces=replaces))
        return put(self, path, data, replaces=replaces)

    def sleep(seconds):
        clock[0] += seconds
        if versions and clock[0] % remote_lease.RENEW_SECONDS == 0:
            faster["count"] += 1
            data = json.dumps(faster).encode()
            versions.append(put(Objects(url), NAME, data, replaces=versions[-1]))

    monkeypatch.setattr(Objects, "put", put_second)
    monkeypatch.setattr(remote_lease.time, "sleep", sleep)
    monkeypatch.setattr(remote_lease.time, "monotonic", lambda: clock[0])
    with pytest.raises(errors.LeaseHeldError, match="on third"):
        RemoteLease(Objects(url))


def test_a_writer_that_was_replaced_learns_it(url, monkeypatch):
    monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 3600)
    held = RemoteLease(Objects(url))
    held._put()
    held.check()
    _, version = Objects(url).read(NAME)
    Objects(url).put(NAME, json.dumps({"host": "b", "pid": 7}).encode(), replaces=version)
    held._put()
    with pytest.raises(errors.FencedError, match="process 7 on b"):
        held.check()
    held.release()
    assert json.loads(Objects(url).read(NAME)[0])["pid"] == 7


def test_a_lost_answer_is_no_loss(url, monkeypatch):
    monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 3600)
    held = RemoteLease(Objects(url))
    held._me["count"] += 1
    Objects(url).put(NAME, held._encode(), replaces=held._version)  # Ours, but nobody knows.
    held._put()
    held.check()
    held.release()


def test_a_store_without_conditions_is_refused(url, monkeypatch):
    def put(self, path, data, replaces):
        self._store.pipe_file(path, data)
        return "1"

    monkeypatch.setattr(versions._Memory, "put", put)
    with pytest.raises(errors.StoreError, match="ignores the conditions"):
        RemoteLease(Objects(url))
