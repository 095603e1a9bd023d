import threading

import pytest

from tekoa import hosts


def test_a_single_process_is_a_group():
    alone = hosts.current()
    assert (alone.index, alone.count, alone.is_writer) == (0, 1, True)
    assert alone.exchange("seed", 3) == [3]
    assert alone.broadcast("seed", 3) == 3
    alone.agree("flags", {"seed": 3})
    alone.leave(0)


def test_a_single_process_stops_at_a_signal():
    assert [hosts.current().is_stop_due(name) for name in (None, "SIGTERM")] == [False, True]


class FakeLink:
    def __init__(self, values):
        self._values = values

    def exchange(self, name, value, *, timeout_seconds):
        return self._values


def test_different_values_are_an_error_that_names_the_processes():
    pair = hosts.Hosts(index=1, count=2, link=FakeLink([{"seed": 1}, {"seed": 2}]))
    with pytest.raises(hosts.HostsError, match=r"flags: process 0 has .*1.*process 1 has .*2"):
        pair.agree("flags", {"seed": 2})


def test_broadcast_returns_the_value_of_process_0():
    assert hosts.Hosts(index=1, count=2, link=FakeLink([5, None])).broadcast("seed", 9) == 5


def test_a_lost_process_ends_this_one_with_code_69(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(hosts.group.os, "_exit", codes.append)
    threading.Thread(target=hosts.group._end, args=("process 1 disconnected.",)).start()
    while not codes:
        pass
    assert codes == [69]
    assert capsys.readouterr().err == (
        "tekoa: process 1 disconnected. Exiting with code 69. Committed checkpoints are intact; "
        "restart all processes to resume.\n"
    )
