import types

import pytest

from tekoa.loop import pace


class Device:
    """Does steps one after the other, each in the same time; the host takes none."""

    def __init__(self, seconds_per_step, monkeypatch):
        self.now = self.n_sent = self.n_done = self.n_waits = 0
        self._seconds = seconds_per_step
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(pace, "time", clock)

    def send(self):
        self.n_sent += 1
        number = self.n_sent

        def wait():
            self.n_waits += 1
            self.now = max(self.now, number * self._seconds)
            self.n_done = max(self.n_done, number)

        return types.SimpleNamespace(block_until_ready=wait)


@pytest.mark.parametrize("seconds_per_step", [1e-4, 1e-3, 0.01, 0.1, 1.0, 30.0])
def test_little_is_under_way_and_the_device_is_never_idle(seconds_per_step, monkeypatch):
    device = Device(seconds_per_step, monkeypatch)
    made = pace.Pace()
    for _ in range(2000):
        made.sent(device.send())
        n_under_way = device.n_sent - device.n_done
        assert n_under_way >= 1
        assert n_under_way * seconds_per_step <= max(2.0, 2 * seconds_per_step)


def test_short_steps_are_hardly_waited_for(monkeypatch):
    device = Device(1e-4, monkeypatch)
    made = pace.Pace()
    for _ in range(2000):
        made.sent(device.send())
    assert device.n_waits < 50


def test_steps_that_give_nothing_are_not_waited_for():
    made = pace.Pace()
    for _ in range(10):
        made.sent(None)
