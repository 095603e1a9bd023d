"""The working copies of this process, so that whoever commits a step there tells their mirror."""

import pathlib
from typing import Protocol


class Observer(Protocol):
    """What is told about the changes in a directory and below."""

    def check(self) -> None:
        """Raises if the directory may no longer be changed."""
        ...

    def notify(self) -> None:
        """Says that something was committed or removed."""
        ...


_observers: dict[pathlib.Path, Observer] = {}


def add(directory: pathlib.Path, observer: Observer) -> None:
    """Adds the observer of a directory, which must be resolved."""
    _observers[directory] = observer


def discard(directory: pathlib.Path) -> None:
    """Removes the observer of a directory."""
    _observers.pop(directory, None)


def is_observed(directory: pathlib.Path) -> bool:
    """Returns whether a directory itself has an observer."""
    return directory in _observers


def check(directory: pathlib.Path) -> None:
    """Raises if a directory may no longer be changed."""
    for observer in _above(directory):
        observer.check()


def notify(directory: pathlib.Path) -> None:
    """Says that something in a directory was committed or removed."""
    for observer in _above(directory):
        observer.notify()


def _above(directory: pathlib.Path) -> list[Observer]:
    # Almost always there is none.
    return [o for root, o in list(_observers.items()) if directory.is_relative_to(root)]
