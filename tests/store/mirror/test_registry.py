import pathlib

import pytest

from tekoa.store.mirror import registry


class Observer:
    def __init__(self):
        self.n = 0

    def check(self):
        raise PermissionError("fenced")

    def notify(self):
        self.n += 1


def test_a_directory_and_those_below_are_observed():
    observer = Observer()
    registry.add(pathlib.Path("/runs/a"), observer)
    registry.notify(pathlib.Path("/runs/a"))
    registry.notify(pathlib.Path("/runs/a/save"))
    registry.notify(pathlib.Path("/runs/ab"))
    registry.check(pathlib.Path("/runs"))
    assert observer.n == 2
    with pytest.raises(PermissionError):
        registry.check(pathlib.Path("/runs/a/save"))
    assert registry.is_observed(pathlib.Path("/runs/a"))
    registry.discard(pathlib.Path("/runs/a"))
    registry.check(pathlib.Path("/runs/a"))
    assert not registry.is_observed(pathlib.Path("/runs/a"))
