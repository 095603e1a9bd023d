"""Work of several processes on one step; here they are threads with a group each."""

import concurrent.futures
import os
import threading

import pytest

from tekoa.core import hosts
from tekoa.store import commit, errors, lease, leaves, manifest, names, restoring, together


class Meeting:
    """Stands for the hub: `exchange` among threads."""

    def __init__(self, n):
        self._n, self._values = n, {}
        self._turn = threading.Condition()

    def link(self, index):
        meeting = self

        class Link:
            def exchange(self, name, value, *, timeout_seconds):
                return meeting.exchange(index, name, value)

        return Link()

    def exchange(self, index, name, value):
        with self._turn:
            here = self._values.setdefault(name, {})
            here[index] = value
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: len(here) == self._n, timeout=60)
            return [here[i] for i in range(self._n)]


def on_each(work, n=2):
    """Runs `work(group)` as n processes; gives results or errors, in order."""
    meeting = Meeting(n)
    groups = [hosts.Hosts(index=i, count=n, link=meeting.link(i)) for i in range(n)]

    def run(group):
        try:
            return work(group)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, groups))


def test_all_get_all_results_in_order():
    found = on_each(lambda group: together.run(group, "count", lambda: group.index), n=3)
    assert found == [[0, 1, 2]] * 3


def test_only_process_0_does_the_writers_work():
    done = []
    found = on_each(
        lambda group: together.run_on_writer(group, "look", lambda: done.append(group.index) or 7)
    )
    assert found == [7, 7]
    assert done == [0]


def test_a_failure_of_one_is_the_same_failure_of_all():
    def work():
        raise errors.LeaseHeldError("taken")

    first, second = on_each(lambda group: together.run_on_writer(group, "open", work))
    assert isinstance(first, errors.LeaseHeldError)
    assert "open failed on process 0: LeaseHeldError: taken" in str(second)
    assert isinstance(second, errors.LeaseHeldError)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_each_checks_a_part_and_damage_in_any_is_found_by_all(tmp_path, monkeypatch, name):
    with lease.held(tmp_path) as held:
        path = commit.commit(held, 3, fill, layout="tekoa")
    current = threading.local()
    monkeypatch.setattr(hosts, "current", lambda: current.group)

    def check(group):
        current.group = group
        return restoring.open_together(path).index.step

    assert on_each(check) == [3, 3]
    (path / name).write_bytes(b"124")
    found = on_each(check)
    assert [type(error) for error in found] == [errors.DamagedError] * 2
    assert all(str(path / name) in str(error) for error in found)


def fill(tmp):
    for name in "abc":
        (tmp / name).write_bytes(b"123")
    leaves.write_index(tmp, leaves.Index(step=3, leaves={}, items=[], meta={}))


@pytest.fixture
def held(tmp_path):
    with lease.held(tmp_path / "run") as held:
        yield held


def save(group, held, write, finish=lambda tmp: None):
    return together.save(
        group,
        held if group.is_writer else None,
        "save",
        step=3,
        write=write,
        finish=finish,
        layout="tekoa",
        facts={},
    )


def write_of(group, error=None):
    def write(tmp):
        folder = tmp / "default" / f"ocdbt.process_{group.index}"
        folder.mkdir(parents=True)
        (folder / "d").write_bytes(b"123")
        if error and group.index == 1:
            raise error

    return write


def test_a_step_of_two_has_one_manifest_over_all_files(held):
    assert on_each(lambda group: save(group, held, write_of(group))) == [None, None]
    sealed = manifest.read(names.step_dir(held.directory, 3))
    # CRC-32 of b'123' as published check values give it.
    wanted = (3, 0x884863D2)
    assert sealed.files == {f"default/ocdbt.process_{i}/d": wanted for i in range(2)}


def test_a_part_that_fails_leaves_nothing(held):
    found = on_each(lambda group: save(group, held, write_of(group, OSError("disk full"))))
    assert "failed on process 1: OSError: disk full" in str(found[0])
    assert isinstance(found[1], OSError)
    assert os.listdir(held.directory) == [lease.NAME]


def test_a_commit_that_fails_is_known_to_all_and_leaves_nothing(held):
    def finish(tmp):
        lease.break_lease(held.directory)

    found = on_each(lambda group: save(group, held, write_of(group), finish))
    assert isinstance(found[0], errors.FencedError)
    assert isinstance(found[1], errors.FencedError)
    assert os.listdir(held.directory) == []
