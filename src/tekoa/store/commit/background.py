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
import weakref
from collections.abc import Callable

from tekoa.store import errors

_log = logging.getLogger("tekoa.store")
_register_once = functools.cache(atexit.register)
_savers: "weakref.WeakSet[BackgroundSaver]" = weakref.WeakSet()


class BackgroundSaver:
    """Runs jobs one after another in a background thread.

    Args:
        fatal_after: Number of consecutive failures that raise; fewer are only logged.
        grace_seconds: How long the program waits at exit for a running job.
    """

    def __init__(self, *, fatal_after: int = 3, grace_seconds: float = 60.0):
        if fatal_after < 1:
            raise ValueError(f"fatal_after must be at least 1, got {fatal_after}.")
        self._fatal_after = fatal_after
        self._grace_seconds = grace_seconds
        self._thread: threading.Thread | None = None
        self._is_unreported = False
        self._n_failed = 0
        self._error: BaseException | None = None
        self._what = ""
        _savers.add(self)
        # A store acquires its lease first, so this runs before the lease is released at exit.
        _register_once(_close_all)

    def start(self, what: str, job: Callable[[], None]) -> None:
        """Starts a job once the running one has ended; not if `poll` raises for that one."""
        self.wait()
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
        else:
            self._n_failed, self._error = 0, None

    def poll(self) -> None:
        """Reports a failure since the last call; see `Store.poll`."""
        if not self._is_unreported:
            return
        self._is_unreported = False
        error = self._error
        if isinstance(error, errors.FencedError):
            self._error = None
            raise error
        message = (
            f"{self._what} failed ({self._n_failed} in a row, fatal after {self._fatal_after}): "
            f"{type(error).__name__}: {error}"
        )
        if self._n_failed >= self._fatal_after:
            self._error = None  # Reported; the exit code is now up to the caller.
            raise errors.SaveFailedError(message) from error
        _log.error("%s. Earlier steps are intact; training continues.", message)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the running job and reports failures; see `Store.wait`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)
            if thread.is_alive():
                return False
            self._thread = None
        self.poll()
        return True

    def close(self, grace_seconds: float | None = None) -> None:
        """Waits for the running job, at most for the grace period; see `Store.close`."""
        grace = self._grace_seconds if grace_seconds is None else grace_seconds
        if not self.wait(grace):
            raise errors.SaveFailedError(f"{self._what} did not end within {grace} seconds.")
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
