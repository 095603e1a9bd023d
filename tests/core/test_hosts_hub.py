import contextlib
import json
import queue
import socket
import threading

import pytest

from tekoa.core import hosts_hub


class Raw:
    """A process of the group that says only what the test makes it say."""

    def __init__(self, hub, index, of=2):
        self.socket = socket.create_connection(("127.0.0.1", hub.port), timeout=30)
        self.lines = self.socket.makefile("rb")
        self.say(hello=index, of=of, pid=100 + index, host="here")

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, kind):
        """The next message of a kind."""
        while line := self.lines.readline():
            message = json.loads(line)
            if kind in message:
                return message
        return None

    def close(self):
        self.lines.close()
        self.socket.close()

    def keep_alive(self):
        """Beats until the connection closes."""
        done = threading.Event()

        def beat():
            while not done.wait(0.2):
                self.say(beat=True)

        threading.Thread(target=beat, daemon=True).start()
        return done


@pytest.fixture
def hub():
    with contextlib.closing(
        hosts_hub.Hub("127.0.0.1", 0, n_processes=2, timeout_seconds=60)
    ) as opened:
        yield opened


@pytest.fixture
def raw():
    """Makes processes of a group, closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda *args: stack.enter_context(contextlib.closing(Raw(*args)))


@pytest.fixture
def pair(hub, raw):
    return raw(hub, 0), raw(hub, 1)


def test_all_are_welcomed_with_their_names(pair):
    who = ["process 0 (number 100 on here)", "process 1 (number 101 on here)"]
    assert [raw.hear("welcome") for raw in pair] == [{"welcome": who}] * 2


def test_values_come_back_in_the_order_of_processes(pair):
    pair[1].say(at="seed", value="b", timeout=60)
    pair[0].say(at="seed", value="a", timeout=60)
    assert [raw.hear("all") for raw in pair] == [{"all": "seed", "values": ["a", "b"]}] * 2


def test_a_second_process_of_one_number_is_refused(hub, raw):
    first, second = raw(hub, 1), raw(hub, 1)
    assert "a second process 1" in second.hear("refused")["refused"]
    assert raw(hub, 0).hear("welcome")
    assert first.hear("welcome")


@pytest.mark.parametrize(("index", "of", "told"), [(1, 3, "told of 2"), (2, 2, "numbered 0 to 1")])
def test_numbers_that_do_not_fit_are_refused(hub, raw, index, of, told):
    assert told in raw(hub, index, of).hear("refused")["refused"]


def test_a_closed_connection_is_a_process_that_died(pair):
    pair[1].close()
    assert "process 1 (number 101 on here) is gone" in pair[0].hear("lost")["lost"]


def test_silence_is_a_process_that_is_stuck(raw):
    with contextlib.closing(hosts_hub.Hub("127.0.0.1", 0, n_processes=2, timeout_seconds=1)) as hub:
        alive, _stuck = raw(hub, 0), raw(hub, 1)
        done = alive.keep_alive()
        assert "process 1 (number 101 on here) is stuck" in alive.hear("lost")["lost"]
        done.set()


def test_who_does_not_come_to_an_exchange_is_named(pair):
    pair[0].say(at="the save of step 7", value=None, timeout=0.1)
    told = pair[0].hear("lost")["lost"]
    assert "process 1" in told
    assert "'the save of step 7'" in told


def test_the_stop_is_after_the_farthest_process(pair):
    pair[1].say(ask_stop="SIGTERM")
    for one, count in zip(pair, (12, 5), strict=True):
        assert one.hear("hold")
        one.say(count=count)
    stops = [raw.hear("stop_at") for raw in pair]
    assert [stop["stop_at"] for stop in stops] == [13, 13]
    assert stops[0]["who"].startswith("process 1")


def test_all_that_say_goodbye_end_in_peace_process_0_last(pair):
    heard = queue.SimpleQueue()
    for raw in pair:
        raw.say(bye=0, why="")
    assert pair[1].hear("over")
    threading.Thread(target=lambda: heard.put(pair[0].hear("over")), daemon=True).start()
    pair[1].socket.shutdown(socket.SHUT_RDWR)
    assert heard.get(timeout=30)


def test_one_that_fails_ends_the_others_with_its_reason(pair, monkeypatch):
    monkeypatch.setattr(hosts_hub, "GRACE_SECONDS", 0.1)
    pair[1].say(bye=66, why="The checkpoint does not fit.")
    told = pair[0].hear("lost")["lost"]
    assert "process 1 (number 101 on here) ended with code 66. The checkpoint" in told


def test_a_port_that_is_taken_is_an_error(hub):
    with pytest.raises(OSError, match="in use"):
        hosts_hub.Hub("127.0.0.1", hub.port, n_processes=2, timeout_seconds=60)
