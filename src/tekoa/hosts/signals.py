"""Stop signals as a flag that loops poll.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP only set the flag; the loop that polls it saves a checkpoint and
exits with `EXIT_STOPPED`. A second signal ends the process immediately. If several processes
train together, any of them may receive the signal; all see the flag at the same poll. JAX then
handles SIGTERM, and the other signals are passed on to it.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from types import FrameType

from tekoa import hosts
from tekoa.hosts.group import EXIT_STOPPED as EXIT_STOPPED

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

    def is_set(self) -> bool:
        """Returns whether to stop because of a signal.

        Processes that train together must poll equally often.
        """
        if self._group.count == 1:
            return self.signal is not None
        is_due = self._group.is_stop_due()
        if is_due and self.signal != signal.SIGTERM:
            self.signal = signal.SIGTERM
            with contextlib.suppress(ValueError):  # Not in the main thread.
                signal.signal(signal.SIGTERM, self._on_signal)
        return is_due

    def is_requested(self) -> bool:
        """Returns whether this process knows that `is_set` will return true; may be called freely.

        For a process that waits on its own, such as for a save.
        """
        return self.signal is not None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Exits without cleanup: a second signal means an immediate stop.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if self._group.count > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGHUP:
            replace_closed_terminal()
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
            if number == signal.SIGTERM and flag._group.count > 1:
                continue  # Handled by JAX.
            with contextlib.suppress(ValueError):
                previous[number] = signal.signal(number, flag._on_signal)
        yield flag
    finally:
        _flags.remove(flag)
        for number, handler in previous.items():
            # Python cannot restore a handler that was not set by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def replace_closed_terminal() -> None:
    """Redirects output to a terminal that was closed, where every write would fail."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def is_stop_requested() -> bool:
    """Returns whether a signal has requested a stop from any `stop_flag` of this program."""
    return any(flag.is_requested() for flag in _flags)
