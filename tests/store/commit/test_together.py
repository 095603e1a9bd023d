"""Work that several processes do together; here they are threads with a group each."""

import threading

import pytest

from tekoa import hosts
from tekoa.store import errors
from tekoa.store.commit import commit, lease, together
from tekoa.store.formats.index import Index, write_index
from tekoa.store.read import restore


def test_all_processes_get_all_results_in_order(on_each):
    results = on_each(lambda group: together.run_on_all(group, "count", lambda: group.index), n=3)
    assert results == [[0, 1, 2]] * 3


def test_only_process_0_does_the_work_of_the_writer(on_each):
    workers = []
    results = on_each(
        lambda group: together.run_on_writer(
            group, "look", lambda: workers.append(group.index) or 7
        )
    )
    assert results == [7, 7]
    assert workers == [0]


def test_a_failure_on_one_process_is_the_same_failure_on_all(on_each):
    def work():
        raise errors.LeaseHeldError("taken")

    first, second = on_each(lambda group: together.run_on_writer(group, "open", work))
    assert isinstance(first, errors.LeaseHeldError)
    assert "open failed on process 0: LeaseHeldError: taken" in str(second)
    assert isinstance(second, errors.LeaseHeldError)


def test_a_bug_on_one_process_is_a_lost_process_to_the_others(on_each):
    def work(group):
        if group.index == 1:
            raise KeyError("bug")

    results = on_each(lambda group: together.run_on_all(group, "read", lambda: work(group)), n=3)
    assert isinstance(results[1], KeyError)
    for other in (results[0], results[2]):
        assert str(other) == "read failed on process 1: KeyError: 'bug'"
        assert other.exit_code == hosts.EXIT_PEER_LOST


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_damage_in_the_share_of_one_process_is_reported_on_all(
    on_each, tmp_path, monkeypatch, name
):
    with lease.held(tmp_path) as held:
        path = commit.commit(held, 3, fill, format="native")
    current = threading.local()
    monkeypatch.setattr(hosts, "current", lambda: current.group)

    def check(group):
        current.group = group
        return restore.open_together(path).index.step

    assert on_each(check) == [3, 3]
    (path / name).write_bytes(b"124")
    failures = on_each(check)
    assert [type(error) for error in failures] == [errors.DamagedError] * 2
    assert all(str(path / name) in str(error) for error in failures)


def fill(tmp):
    for name in "abc":
        (tmp / name).write_bytes(b"123")
    write_index(tmp, Index(step=3, leaves={}, items=[], meta={}))
