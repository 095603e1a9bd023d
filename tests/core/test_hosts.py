import threading

import pytest

from tekoa.core import hosts


def test_a_process_alone_agrees_with_itself():
    alone = hosts.current()
    assert (alone.index, alone.count, alone.is_writer) == (0, 1, True)
    assert alone.exchange("seed", 3) == [3]
    assert alone.broadcast("seed", 3) == 3
    alone.agree("flags", {"seed": 3})
    alone.leave(0)


def test_a_process_alone_stops_when_it_is_signalled():
    assert [hosts.current().is_stop_due(name) for name in (None, "SIGTERM")] == [False, True]


class Fake:
    def __init__(self, values):
        self._values = values

    def exchange(self, name, value, *, timeout_seconds):
        return self._values


def test_processes_that_do_not_agree_are_told_who():
    pair = hosts.Hosts(index=1, count=2, link=Fake([{"seed": 1}, {"seed": 2}]))
    with pytest.raises(hosts.HostsError, match=r"flags: process 0 has .*1.*process 1 has .*2"):
        pair.agree("flags", {"seed": 2})


def test_only_process_0_gives_the_value():
    assert hosts.Hosts(index=1, count=2, link=Fake([5, None])).broadcast("seed", 9) == 5


def test_a_lost_peer_ends_the_process_with_its_code(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(hosts.os, "_exit", codes.append)
    threading.Thread(target=hosts._end, args=("process 1 is gone.",)).start()
    while not codes:
        pass
    assert codes == [69]
    assert "process 1 is gone" in capsys.readouterr().err
