"""Fault points send their signal exactly when requested."""

import pathlib
import signal

import pytest

import tekoa
from tekoa.store.commit import fault_points


def test_every_point_is_somewhere_in_the_code():
    texts = [path.read_text() for path in pathlib.Path(tekoa.__file__).parent.rglob("*.py")]
    for point in fault_points.POINTS:
        assert any(f'reach("{point}")' in text for text in texts), point


def test_signal_is_sent_the_nth_time(monkeypatch):
    caught = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    try:
        monkeypatch.setenv("TEKOA_FAULT_AT", "mid_gc:2:SIGUSR2")
        monkeypatch.setattr(fault_points, "_reached", fault_points.collections.Counter())
        fault_points.reach("mid_gc")
        fault_points.reach("before_gc")
        assert caught == []
        fault_points.reach("mid_gc")
        assert caught == [signal.SIGUSR2]
        fault_points.reach("mid_gc")
        assert caught == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("text", ["", "mid_gc", "mid_gc:x:SIGKILL", "mid_gc:1:SIGNOTHING"])
def test_malformed_variable_raises(monkeypatch, text):
    monkeypatch.setenv("TEKOA_FAULT_AT", text)
    with pytest.raises(ValueError, match="TEKOA_FAULT_AT"):
        fault_points.reach("mid_gc")
