"""Limits how far the host runs ahead of the device.

Steps are dispatched without waiting for their results. Without a limit, a program with long steps
would have dispatched dozens of them when a stop is requested, and would have to wait for them all.
"""

import time
from typing import Protocol

# Target for the run time of the steps in flight; a stop waits at most twice as long, or two steps.
_SECONDS = 0.5
_MAX_BETWEEN = 64


class Waitable(Protocol):
    """An array that a step computes."""

    def block_until_ready(self) -> object:
        """Waits until the step is complete."""
        ...


class Lookahead:
    """Waits from time to time for a step that was dispatched a while ago.

    The number of steps between two waits adapts to their duration: short steps rarely wait; of
    long steps, at most two are in flight.
    """

    def __init__(self):
        self._n_between, self._n_sent = 1, 0
        self._mark: Waitable | None = None
        self._time = time.perf_counter()

    def sent(self, output: Waitable | None) -> None:
        """Counts a dispatched step, and waits for an earlier one if that is due.

        Args:
            output: An output of the step, or None if it has none.
        """
        self._n_sent += 1
        if self._n_sent < self._n_between:
            return
        self._n_sent = 0
        before, self._mark = self._mark, output
        if before is not None:
            before.block_until_ready()
        now = time.perf_counter()
        seconds, self._time = now - self._time, now
        if seconds < _SECONDS / 4:
            self._n_between = min(2 * self._n_between, _MAX_BETWEEN)
        elif seconds > _SECONDS:
            self._n_between = max(self._n_between // 2, 1)
