import types

import pytest

from tekoa.loop.engine import lookahead


class Device:
    """Runs steps in order, each in the same time; the host needs no time."""

    def __init__(self, seconds_per_step, monkeypatch):
        self.now = self.n_sent = self.n_done = self.n_waits = 0
        self._seconds = seconds_per_step
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(lookahead, "time", clock)

    def send(self):
        self.n_sent += 1
        number = self.n_sent

        def wait():
            self.n_waits += 1
            self.now = max(self.now, number * self._seconds)
            self.n_done = max(self.n_done, number)

        return types.SimpleNamespace(block_until_ready=wait)


@pytest.mark.parametrize("seconds_per_step", [1e-4, 1e-3, 0.01, 0.1, 1.0, 30.0])
def test_few_steps_are_in_flight_and_the_device_is_never_idle(seconds_per_step, monkeypatch):
    device = Device(seconds_per_step, monkeypatch)
    limit = lookahead.Lookahead()
    for _ in range(2000):
        limit.sent(device.send())
        n_in_flight = device.n_sent - device.n_done
        assert n_in_flight >= 1
        assert n_in_flight * seconds_per_step <= max(2.0, 2 * seconds_per_step)


def test_short_steps_rarely_wait(monkeypatch):
    device = Device(1e-4, monkeypatch)
    limit = lookahead.Lookahead()
    for _ in range(2000):
        limit.sent(device.send())
    assert device.n_waits < 50


def test_steps_without_output_do_not_wait():
    limit = lookahead.Lookahead()
    for _ in range(10):
        limit.sent(None)
