"""Saves in a background thread: one at a time, errors reported, awaited at exit.

A program that simply ends still commits its last save. If that save fails, the program exits
with the code of `errors.SaveFailedError`.
"""

import atexit
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from tekoa.hosts import signals
from tekoa.store import errors

# A job that waits longer than this for the one before is reported.
_LATE_SECONDS = 1.0
_POLL_SECONDS = 0.05

_log = logging.getLogger("tekoa.store")
_register_once = functools.cache(atexit.register)
_savers: "weakref.WeakSet[BackgroundSaver]" = weakref.WeakSet()


class BackgroundSaver:
    """Runs jobs one after another in a background thread; any thread may start them.

    Args:
        fatal_after: Number of consecutive failures that raise; fewer are only logged.
        grace_seconds: How long the program waits for a running job when it ends or is stopped.

    Attributes:
        n_late: Number of jobs that had to wait for the one before, or were postponed.
    """

    def __init__(self, *, fatal_after: int = 3, grace_seconds: float = 60.0):
        if fatal_after < 1:
            raise ValueError(f"fatal_after must be at least 1, got {fatal_after}.")
        self._fatal_after = fatal_after
        self._grace_seconds = grace_seconds
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._postponed: tuple[str, Callable[[], None]] | None = None
        self._is_unreported = False
        self._has_given_up = False
        self._n_failed = 0
        self._error: BaseException | None = None
        self._what = ""
        self.n_late = 0
        _savers.add(self)
        # A store acquires its lease first, so this runs before the lease is released at exit.
        _register_once(_close_all)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, what: str, job: Callable[[], None]) -> None:
        """Starts a job once the running one has ended; not if `poll` raises for that one.

        A postponed job is dropped.

        Raises:
            errors.SaveFailedError: As for `poll`; and if a stop was requested and the
                running job does not end within the grace period.
        """
        with self._starting:
            self._postponed = None
            self._wait_for_previous(what)
            self.poll()
            self._begin(what, job)

    def postpone(self, what: str, job: Callable[[], None]) -> None:
        """Starts a job in the next `wait` or `close`, unless another is started before."""
        self.n_late += 1
        _log.warning("%s was skipped: %s has not ended (%d late)", what, self._what, self.n_late)
        self._postponed = (what, job)

    def _begin(self, what: str, job: Callable[[], None]) -> None:
        self._what = what
        self._thread = threading.Thread(
            target=self._run, args=(what, job), name="tekoa-save", daemon=True
        )
        self._thread.start()

    def _run(self, what: str, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._n_failed, self._error, self._what = self._n_failed + 1, error, what
            self._is_unreported = True
            if self._n_failed < self._fatal_after and not isinstance(error, errors.FencedError):
                _log.error("%s. Earlier steps are intact; training continues.", self._message())
        else:
            self._n_failed, self._error = 0, None

    def _message(self) -> str:
        return (
            f"{self._what} failed ({self._n_failed} in a row, fatal after {self._fatal_after}): "
            f"{type(self._error).__name__}: {self._error}"
        )

    def _wait_for_previous(self, what: str) -> None:
        """Waits as long as it takes, or for the grace period once a stop is requested."""
        if not self.is_busy:
            return
        self.n_late += 1
        started = time.monotonic()
        is_reported, deadline = False, None
        while not self._join(_POLL_SECONDS):
            now = time.monotonic()
            if not is_reported and now - started > _LATE_SECONDS:
                is_reported = True
                _log.warning("%s waits for the previous save (%d late)", what, self.n_late)
            if deadline is None and signals.is_stop_requested():
                deadline = now + self._grace_seconds
            if deadline is not None and now > deadline:
                self._give_up(self._grace_seconds)

    def _join(self, timeout_seconds: float | None) -> bool:
        """Waits for the running job and returns whether it ended."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _give_up(self, seconds: float) -> None:
        self._has_given_up = True
        raise errors.SaveFailedError(
            f"{self._what} did not end within {seconds:g} seconds. Earlier steps are intact. Check "
            "whether the disk responds."
        )

    def poll(self) -> None:
        """Raises if the failures since the last call are fatal; see `Store.poll`."""
        if not self._is_unreported:
            return
        self._is_unreported = False
        error = self._error
        if isinstance(error, errors.FencedError):
            self._error = None
            raise error
        if self._n_failed >= self._fatal_after:
            message = self._message()
            self._error = None  # Reported; the exit code is now up to the caller.
            raise errors.SaveFailedError(message) from error

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the running job and then for a postponed one; see `Store.wait`."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._join(left):
                return False
            self.poll()
            with self._starting:
                if self.is_busy:
                    continue  # Another thread started a job in the meantime.
                if self._postponed is None:
                    return True
                (what, job), self._postponed = self._postponed, None
                self._begin(what, job)

    def close(self, grace_seconds: float | None = None) -> None:
        """Waits for the running job, at most for the grace period; see `Store.close`."""
        grace = self._grace_seconds if grace_seconds is None else grace_seconds
        # The program waits for a stuck disk once, however often it is closed.
        if not self.wait(0 if self._has_given_up else grace):
            self._give_up(grace)
        _savers.discard(self)
        if self._error is not None:
            raise errors.SaveFailedError(f"{self._what} failed: {self._error}") from self._error


def _close_all() -> None:
    failures: list[errors.StoreError] = []
    for saver in list(_savers):
        try:
            saver.close()
        except errors.StoreError as error:
            failures.append(error)
    if not failures:
        return
    for error in failures:
        print(f"tekoa: at exit: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(errors.SaveFailedError.exit_code)
