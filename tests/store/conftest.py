"""Golden T5X checkpoints, saved steps, and groups of processes in threads."""

import concurrent.futures
import threading

import pytest

from support import files
from tekoa import hosts, store


@pytest.fixture
def golden():
    """The directory of checkpoints written by T5X itself."""
    return files.GOLDEN / "t5x"


@pytest.fixture
def saved(tmp_path):
    """A function that saves trees as step 5 and returns the directory of steps."""

    def save(items, **options):
        with store.Store(tmp_path / "saved", **options) as writer:
            writer.save(5, items, meta={"position": 9})
        return tmp_path / "saved"

    return save


@pytest.fixture
def on_each():
    """A function that runs work as several processes, which are threads here."""
    return run_on_each


def run_on_each(work, n=2):
    """Runs `work(group)` as n processes; returns results or errors, in order."""
    meeting = Meeting(n)
    groups = [hosts.Hosts(index=i, count=n, link=meeting.link(i)) for i in range(n)]

    def run(group):
        try:
            return work(group)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, groups))


class Meeting:
    """Takes the place of the hub: exchanges values among threads."""

    def __init__(self, n):
        self._n, self._values = n, {}
        self._turn = threading.Condition()

    def link(self, index):
        meeting = self

        class Link:
            def exchange(self, name, value, *, timeout_seconds):
                return meeting.exchange(index, name, value)

        return Link()

    def exchange(self, index, name, value):
        with self._turn:
            values = self._values.setdefault(name, {})
            values[index] = value
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: len(values) == self._n, timeout=60)
            return [values[i] for i in range(self._n)]
