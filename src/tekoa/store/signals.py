"""A wish to stop, as a flag that loops look at.

SIGTERM, SIGINT and SIGUSR1 only set the flag: the loop that polls it saves and ends
with `EXIT_STOPPED`. A second signal ends the process at once. Of processes that train
together any one may get the signal; all see the flag set at the same poll.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from tekoa.core import hosts

# As sysexits' EX_TEMPFAIL: stopped, and can be resumed.
EXIT_STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """Set by a signal; read by `is_set`, which costs next to nothing.

    Attributes:
        signal: The signal that this process got, None if it got none.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._group = hosts.current()
        self._group.watch_signals(self._name)

    def is_set(self) -> bool:
        """Tells whether a signal has asked to stop.

        Processes that train together must poll equally often, as the same program does.
        """
        return self._group.is_stop_due(self._name())

    def is_asked(self) -> bool:
        """Tells whether a stop is agreed on, so that `is_set` will tell the same.

        For a process that waits alone, such as for a checkpoint to come.
        """
        return self._group.is_stop_agreed(self._name())

    def _name(self) -> str | None:
        return None if self.signal is None else self.signal.name

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Nothing buffered, nothing cleaned up: whoever signals twice means it.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if number == signal.SIGINT:
            # Whoever presses Ctrl-C looks on. Not by print: it may be what was interrupted.
            os.write(2, b"\nStopping; Ctrl-C once more ends at once.\n")


@contextlib.contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Turns stop signals into a flag for the body of a `with` statement.

    In a thread that is not the main one signals cannot be caught; the flag is then
    never set.

    Yields:
        The flag. Handlers of before are back afterwards.
    """
    flag = StopFlag()
    before = {}
    try:
        for number in SIGNALS:
            with contextlib.suppress(ValueError):
                before[number] = signal.signal(number, flag._on_signal)
        yield flag
    finally:
        for number, handler in before.items():
            # A handler that was not made in Python cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
