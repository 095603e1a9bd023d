"""The fault hook: silent when unset, exact when set."""

import signal
import timeit

import pytest

from tekoa.store import faultpoints


def test_unset_costs_next_to_nothing(monkeypatch):
    monkeypatch.delenv("TEKOA_FAULT_AT", raising=False)
    seconds = min(timeit.repeat(lambda: faultpoints.reach("mid_gc"), number=1000, repeat=3))
    assert seconds / 1000 < 2e-5


def test_signal_comes_at_the_nth_time(monkeypatch):
    caught = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    try:
        monkeypatch.setenv("TEKOA_FAULT_AT", "mid_gc:2:SIGUSR2")
        monkeypatch.setattr(faultpoints, "_reached", faultpoints.collections.Counter())
        faultpoints.reach("mid_gc")
        faultpoints.reach("before_gc")
        assert caught == []
        faultpoints.reach("mid_gc")
        assert caught == [signal.SIGUSR2]
        faultpoints.reach("mid_gc")
        assert caught == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("text", ["", "mid_gc", "mid_gc:x:SIGKILL", "mid_gc:1:SIGNOTHING"])
def test_unreadable_wish_is_an_error(monkeypatch, text):
    monkeypatch.setenv("TEKOA_FAULT_AT", text)
    with pytest.raises(ValueError, match="TEKOA_FAULT_AT"):
        faultpoints.reach("mid_gc")
