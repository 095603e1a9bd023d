import contextlib
import json
import queue
import socket
import threading

import pytest

from tekoa.hosts import hub as hub_lib


class Raw:
    """A process of the group that sends only the messages of the test."""

    def __init__(self, hub, index, of=2):
        self.socket = socket.create_connection(("127.0.0.1", hub.port), timeout=30)
        self.lines = self.socket.makefile("rb")
        self.say(hello=index, of=of, pid=100 + index, host="here")

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, kind):
        """Returns the next message of a kind."""
        while line := self.lines.readline():
            message = json.loads(line)
            if kind in message:
                return message
        return None

    def close(self):
        self.lines.close()
        self.socket.close()

    def keep_alive(self):
        """Sends heartbeats until the returned event is set."""
        done = threading.Event()

        def beat():
            while not done.wait(0.2):
                self.say(beat=True)

        threading.Thread(target=beat, daemon=True).start()
        return done


@pytest.fixture
def hub():
    with contextlib.closing(hub_lib.Hub("127.0.0.1", 0, n_processes=2, timeout_seconds=60)) as hub:
        yield hub


@pytest.fixture
def raw():
    """Creates processes of a group, which are closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda *args: stack.enter_context(contextlib.closing(Raw(*args)))


@pytest.fixture
def pair(hub, raw):
    return raw(hub, 0), raw(hub, 1)


def test_the_welcome_describes_all_processes(pair):
    who = ["process 0 (pid 100 on here)", "process 1 (pid 101 on here)"]
    assert [raw.hear("welcome") for raw in pair] == [{"welcome": who}] * 2


def test_values_are_returned_in_the_order_of_processes(pair):
    pair[1].say(at="seed", value="b", timeout=60)
    pair[0].say(at="seed", value="a", timeout=60)
    assert [raw.hear("all") for raw in pair] == [{"all": "seed", "values": ["a", "b"]}] * 2


def test_a_second_process_with_the_same_index_is_refused(hub, raw):
    first, second = raw(hub, 1), raw(hub, 1)
    assert "process 1 (pid 101 on here) has joined already" in second.hear("refused")["refused"]
    assert raw(hub, 0).hear("welcome")
    assert first.hear("welcome")


@pytest.mark.parametrize(
    ("index", "of", "message"), [(1, 3, "expects 2 processes"), (2, 2, "must be 0 to 1")]
)
def test_another_group_size_or_index_is_refused(hub, raw, index, of, message):
    assert message in raw(hub, index, of).hear("refused")["refused"]


def test_a_closed_connection_is_a_lost_process(pair):
    pair[1].close()
    reason = pair[0].hear("lost")["lost"]
    assert reason == "process 1 (pid 101 on here) disconnected unexpectedly."


def test_missing_heartbeats_mean_a_hung_process(raw):
    with contextlib.closing(hub_lib.Hub("127.0.0.1", 0, n_processes=2, timeout_seconds=1)) as hub:
        alive, _hung = raw(hub, 0), raw(hub, 1)
        done = alive.keep_alive()
        assert "process 1 (pid 101 on here) hangs" in alive.hear("lost")["lost"]
        done.set()


def test_a_process_missing_at_an_exchange_is_named(pair):
    pair[0].say(at="the save of step 7", value=None, timeout=0.1)
    reason = pair[0].hear("lost")["lost"]
    assert "process 1" in reason
    assert "'the save of step 7'" in reason


def test_the_stop_is_at_the_first_poll_that_no_process_has_passed(pair):
    pair[1].say(ask_stop="SIGTERM")
    for raw, count in zip(pair, (12, 5), strict=True):
        assert raw.hear("hold")
        raw.say(count=count)
    stops = [raw.hear("stop_at") for raw in pair]
    assert [stop["stop_at"] for stop in stops] == [13, 13]
    assert stops[0]["who"].startswith("process 1")


def test_when_all_leave_process_0_ends_last(pair):
    messages = queue.SimpleQueue()
    for raw in pair:
        raw.say(bye=0, why="")
    assert pair[1].hear("over")
    threading.Thread(target=lambda: messages.put(pair[0].hear("over")), daemon=True).start()
    pair[1].socket.shutdown(socket.SHUT_RDWR)
    assert messages.get(timeout=30)


def test_a_failed_process_ends_the_others_with_its_reason(pair, monkeypatch):
    monkeypatch.setattr(hub_lib, "GRACE_SECONDS", 0.1)
    pair[1].say(bye=66, why="The checkpoint does not fit.")
    reason = pair[0].hear("lost")["lost"]
    assert "process 1 (pid 101 on here) exited with code 66. The checkpoint" in reason


def test_a_port_in_use_is_an_error(hub):
    with pytest.raises(OSError, match="in use"):
        hub_lib.Hub("127.0.0.1", hub.port, n_processes=2, timeout_seconds=60)
