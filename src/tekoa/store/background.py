"""One job at a time in a thread, its errors brought back, waited for at exit.

A program that just ends still commits its last save: `threading` runs our exit hook
while executors, which a save needs, still take work. `atexit` would come too late for
that; it only ends the program with a code that tells of the failure.
"""

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable

from tekoa.store import errors

_log = logging.getLogger("tekoa.store")
_runners: "weakref.WeakSet[Runner]" = weakref.WeakSet()
_hooked = False
_failed_at_exit: list[str] = []


class Runner:
    """Runs jobs one after the other in the background.

    Args:
        fatal_after: Raise once this many jobs in a row have failed; fewer failures
            are logged.
        grace_seconds: How long the end of the program may wait for a running job.
    """

    def __init__(self, *, fatal_after: int = 3, grace_seconds: float = 60.0):
        if fatal_after < 1:
            raise ValueError(f"fatal_after must be at least 1, got {fatal_after}.")
        self._fatal_after = fatal_after
        self._grace_seconds = grace_seconds
        self._thread: threading.Thread | None = None
        self._has_news = False
        self._n_failed = 0
        self._error: BaseException | None = None
        self._what = ""
        _runners.add(self)
        _hook()

    def start(self, what: str, job: Callable[[], None]) -> None:
        """Starts a job after the running one, if any, has ended.

        Raises:
            errors.SaveFailedError: As `poll`; the new job is then not started.
        """
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
            self._n_failed += 1
            self._error = error
            self._what = what
            self._has_news = True
        else:
            self._n_failed = 0
            self._error = None

    def poll(self) -> None:
        """Reports a failure since the last call; costs nothing when there is none.

        Raises:
            errors.SaveFailedError: After `fatal_after` failures in a row.
            errors.FencedError: At once, if the lease is lost.
        """
        if not self._has_news:
            return
        self._has_news = False
        error = self._error
        if isinstance(error, errors.FencedError):
            self._error = None
            raise error
        message = (
            f"{self._what} failed ({self._n_failed} in a row, fatal after {self._fatal_after}): "
            f"{type(error).__name__}: {error}"
        )
        if self._n_failed >= self._fatal_after:
            self._error = None  # Told once; the exit code is the caller's now.
            raise errors.SaveFailedError(message) from error
        _log.error("%s. Earlier steps are intact; training goes on.", message)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the running job and reports as `poll` does.

        Returns:
            Whether it ended in time.
        """
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)
            if thread.is_alive():
                return False
            self._thread = None
        self.poll()
        return True

    def close(self, grace_seconds: float | None = None) -> None:
        """Waits for the running job, for a bounded time.

        Raises:
            errors.SaveFailedError: If it does not end in time, or the last job failed.
        """
        grace = self._grace_seconds if grace_seconds is None else grace_seconds
        if not self.wait(grace):
            raise errors.SaveFailedError(f"{self._what} did not end within {grace} seconds.")
        _runners.discard(self)
        if self._error is not None:
            raise errors.SaveFailedError(f"{self._what} failed: {self._error}") from self._error


def _hook() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    # Not a public name, but the only moment between the end of the main thread and the
    # closing of executors; where it is missing, atexit commits what needs no executor.
    register = getattr(threading, "_register_atexit", atexit.register)
    import concurrent.futures.thread  # noqa: F401  (its hook must be older than ours)

    atexit.register(_end_with_code)
    register(_close_all)


def _close_all() -> None:
    for runner in list(_runners):
        try:
            runner.close()
        except errors.StoreError as error:
            _failed_at_exit.append(str(error))


def _end_with_code() -> None:
    if not _failed_at_exit:
        return
    for message in _failed_at_exit:
        print(f"tekoa: at exit: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(errors.SaveFailedError.exit_code)
