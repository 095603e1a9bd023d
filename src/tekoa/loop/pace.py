"""How far the host runs ahead of the device.

Steps are sent off without waiting. Unbounded, a program of long steps would have sent off
dozens when it is asked to stop, and would have to wait for them all.
"""

import time
from typing import Protocol

# About the time that sent off steps may take; a stop waits twice that at most, or two steps.
_SECONDS = 0.5
_MOST_BETWEEN = 64


class Waitable(Protocol):
    """An array that a step makes."""

    def block_until_ready(self) -> object:
        """Waits until the step is done."""
        ...


class Pace:
    """Waits, now and then, for a step that was sent off some time ago.

    How many steps lie between two waits follows from the time they take: short steps hardly
    pay for it, of long ones two are under way.
    """

    def __init__(self):
        self._n_between, self._n_sent = 1, 0
        self._mark: Waitable | None = None
        self._time = time.perf_counter()

    def sent(self, output: Waitable | None) -> None:
        """Takes note of one more step; waits if that is due.

        Args:
            output: What the step will give, None if it gives nothing.
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
            self._n_between = min(2 * self._n_between, _MOST_BETWEEN)
        elif seconds > _SECONDS:
            self._n_between = max(self._n_between // 2, 1)
