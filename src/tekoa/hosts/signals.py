"""Stop signals as a flag that loops poll.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP only set the flag; the loop that polls it saves a checkpoint and
exits with `EXIT_STOPPED`. A second signal ends the process immediately. If several processes
train together, any of them may receive the signal; all see the flag at the same poll.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from types import FrameType

from tekoa import hosts

# EX_TEMPFAIL of sysexits: stopped, and can be resumed.
EXIT_STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

_flags: list["StopFlag"] = []


class StopFlag:
    """A flag set by a stop signal; cheap to poll by `is_set`.

    Attributes:
        signal: The signal that this process received, or None.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._group = hosts.current()
        self._group.watch_signals(self._name)

    def is_set(self) -> bool:
        """Returns whether to stop because of a signal.

        Processes that train together must poll equally often.
        """
        return self._group.is_stop_due(self._name())

    def is_requested(self) -> bool:
        """Returns whether a stop is agreed on, so that `is_set` will return true.

        For a process that waits on its own, such as for the next checkpoint.
        """
        return self._group.is_stop_agreed(self._name())

    def _name(self) -> str | None:
        return None if self.signal is None else self.signal.name

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Exits without cleanup: a second signal means an immediate stop.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if number == signal.SIGHUP:
            _replace_closed_terminal()
        if number == signal.SIGINT:
            # Not by print, which may be what the signal interrupted.
            os.write(2, b"\nStopping. Press Ctrl-C again to exit immediately.\n")


@contextlib.contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Turns stop signals into a flag for the body of a `with` statement.

    Signals can only be caught in the main thread; in other threads the flag is never set.

    Yields:
        The flag. The previous signal handlers are restored afterwards.
    """
    flag = StopFlag()
    previous = {}
    _flags.append(flag)
    try:
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # Started by nohup.
            with contextlib.suppress(ValueError):
                previous[number] = signal.signal(number, flag._on_signal)
        yield flag
    finally:
        _flags.remove(flag)
        for number, handler in previous.items():
            # Python cannot restore a handler that was not set by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _replace_closed_terminal() -> None:
    """Redirects output to a terminal that was closed, where every write would fail."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def is_stop_requested() -> bool:
    """Returns whether a `stop_flag` of this program has been told to stop."""
    return any(flag.is_requested() for flag in _flags)
