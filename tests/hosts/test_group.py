import logging

import jax
import pytest

from support.coordination import Service, run_on_each
from tekoa import hosts
from tekoa.hosts.channel import Channel


def test_a_single_process_is_a_group():
    alone = hosts.current()
    assert (alone.index, alone.count, alone.is_writer) == (0, 1, True)
    assert alone.exchange("seed", 3) == [3]
    assert alone.broadcast("seed", 3) == 3
    assert alone.gather("seed", 3) == [3]
    alone.agree("flags", {"seed": 3})
    alone.leave(0)


def test_gather_returns_the_values_on_process_0_only():
    values = run_on_each(lambda group: group.gather("part", group.index), n=3)
    assert values == [[0, 1, 2], None, None]


def test_broadcast_returns_the_value_of_process_0():
    assert run_on_each(lambda group: group.broadcast("seed", 5 + group.index), n=3) == [5, 5, 5]


def test_exchanges_of_one_name_are_kept_apart():
    def work(group):
        return [group.exchange("turn", [group.index, turn]) for turn in range(3)]

    expected = [[[0, turn], [1, turn]] for turn in range(3)]
    assert run_on_each(work) == [expected, expected]


def test_different_values_are_an_error_that_names_the_processes():
    def work(group):
        group.agree("flags", {"seed": 1 if group.index < 2 else 2, "steps": 9})

    for error in run_on_each(work, n=3):
        assert isinstance(error, hosts.HostsError)
        assert "flags: process 0 has {'seed': 1}, process 2 has {'seed': 2}" in str(error)


class ExitedError(BaseException):
    pass


@pytest.fixture
def process_0(monkeypatch):
    """Process 0 of two; an exit raises ExitedError with the code."""

    def leave(code):
        raise ExitedError(code)

    monkeypatch.setattr(hosts.group.os, "_exit", leave)
    monkeypatch.setattr(hosts.group, "_BLOCK_SECONDS", 0.01)
    monkeypatch.setattr(hosts.group, "_GRACE_SECONDS", 0.01)
    group = hosts.Hosts(index=0, count=2, channel=Channel(Service()))
    group.channel.put("members/1", "pid 4711 on node1")
    return group


def test_a_process_that_is_missing_is_named_and_given_up(process_0, capsys):
    with pytest.raises(ExitedError, match="69"):
        process_0.gather("save", timeout_seconds=0.05)
    err = capsys.readouterr().err
    assert "tekoa: process 1 (pid 4711 on node1) did not reach 'save' within" in err
    assert "Exiting with code 69. Committed checkpoints are intact; restart all" in err


def test_a_long_wait_is_logged_once(process_0, capsys, caplog, monkeypatch):
    monkeypatch.setattr(hosts.group, "_WARN_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, "tekoa"), pytest.raises(ExitedError):
        process_0.gather("save", timeout_seconds=0.1)
    (record,) = caplog.records
    assert "'save' has waited" in record.getMessage()
    assert "for process 1 (pid 4711 on node1)." in record.getMessage()


@pytest.mark.parametrize("exchange", ["gather", "broadcast"])
def test_the_failure_of_another_process_ends_this_one(process_0, capsys, exchange):
    process_0.channel.put("failure", {"index": 1, "code": 74, "why": "Disk full."})
    with pytest.raises(ExitedError, match="69"):
        getattr(process_0, exchange)("save")
    text = "process 1 (pid 4711 on node1) exited with code 74. Disk full. Exiting with code 69."
    assert text in capsys.readouterr().err


def test_a_service_that_is_gone_ends_this_process(process_0, capsys):
    def fail(*_):
        raise RuntimeError("UNAVAILABLE: refused\nmore")

    process_0.channel._client.blocking_key_value_get = fail
    with pytest.raises(ExitedError, match="69"):
        process_0.gather("save")
    assert "The service in process 0 failed: UNAVAILABLE: refused. Exiting" in (
        capsys.readouterr().err
    )


def test_process_0_waits_for_the_others_before_it_exits(process_0, monkeypatch):
    monkeypatch.setattr(hosts.group, "_GRACE_SECONDS", 60)
    process_0.channel.put("leaving/1", 2)
    with pytest.raises(ExitedError, match="2"):
        process_0.leave(2, "wrong flags")
    assert process_0.channel.get("failure") == {"index": 0, "code": 2, "why": "wrong flags"}


def test_the_first_failure_is_the_one_that_others_report(process_0):
    process_0.channel.put("failure", {"index": 1, "code": 74, "why": "Disk full."})
    with pytest.raises(ExitedError, match="69"):
        process_0.leave(69, "a collective operation failed")
    assert process_0.channel.get("failure")["code"] == 74


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", 2, True),
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", 1, False),
        ("RESOURCE_EXHAUSTED: Out of memory", 2, False),
    ],
)
def test_a_failed_collective_is_a_lost_process(monkeypatch, text, n, expected):
    monkeypatch.setattr(hosts.group, "_joined", [hosts.Hosts(count=n)])
    for kind in (jax.errors.JaxRuntimeError, ValueError):
        assert hosts.is_failed_collective(kind(text)) is expected
    assert not hosts.is_failed_collective(OSError(text))
    assert not hosts.is_failed_collective(ValueError("Connection is not a known setting."))
