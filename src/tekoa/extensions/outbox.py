"""Outbox: passes records to a sink in the background, in order, without delaying training.

A sink is anything that stores points: event files, JSON lines, a tracking service. Only the
background thread of its outbox calls it, so a slow, full or broken disk never holds up a
training step. A checkpoint writer takes a `barrier` when it starts a save: the save's own
thread then waits until everything put before it is safe, and commits afterwards.

A sink that cannot take records back, such as a tracking service, is `held_for` a directory: its
records wait until a checkpoint that was started after them is committed there. Saves never wait
for such a sink.
"""

import atexit
import collections
import functools
import itertools
import logging
import pathlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_log = logging.getLogger("tekoa")
_register_once = functools.cache(atexit.register)
_outboxes: "weakref.WeakSet[Outbox]" = weakref.WeakSet()

MAX_PENDING = 100_000
RETRY_SECONDS = 2.0
IDLE_SECONDS = 1.0
GRACE_SECONDS = 10.0


class Sink(Protocol):
    """Where records are written. Its methods are never called by two threads at once."""

    def write(self, records: Sequence[Any]) -> None:
        """Writes records, in order: all of them, or none if it raises."""
        ...

    def sync(self) -> None:
        """Returns once all records written so far would survive a crash."""
        ...

    def close(self) -> None:
        """Releases what the sink holds."""
        ...


class Outbox:
    """Writes records to a sink in a background thread.

    A sink that fails is reported once and tried again every `RETRY_SECONDS`. Meanwhile records
    are kept, up to `max_pending`; later ones are lost, which is reported when it begins and, with
    their number, when the outbox is closed.

    Args:
        sink: Where the records go.
        name: Names the sink in messages.
        max_pending: Maximum number of records in memory.
        held_for: Directory of the checkpoints whose commits release the records; None to write
            them at once.

    >>> class Printer:
    ...     def write(self, records): print(*records)
    ...     def sync(self): print('safe')
    ...     def close(self): print('closed')
    >>> outbox = Outbox(Printer(), name='the printer')
    >>> outbox.put(['a', 'b']); outbox.close()
    a b
    safe
    closed
    """

    def __init__(
        self,
        sink: Sink,
        *,
        name: str,
        max_pending: int = MAX_PENDING,
        held_for: pathlib.Path | None = None,
    ):
        self._sink, self._name, self._max_pending = sink, name, max_pending
        self._held_for = None if held_for is None else held_for.resolve()
        self._changed = threading.Condition()
        self._pending: collections.deque[Any] = collections.deque()
        self._thread: threading.Thread | None = None
        # Records put so far, how many of them are to be synced, and how many are safe (or lost).
        self._n_put = self._n_to_sync = self._n_safe = 0
        self._n_written = self._n_lost = self._n_released = 0
        self._is_failing = self._is_losing = self._is_closing = self._is_closed = False
        self._is_sink_closed = False
        _outboxes.add(self)
        _register_once(_close_all)

    def put(self, records: Sequence[Any]) -> None:
        """Adds records to be written; returns at once."""
        with self._changed:
            if self._is_closed:
                raise ValueError(f"{self._name} is closed.")
            n_free = self._max_pending - len(self._pending)
            self._pending.extend(records[:n_free])
            self._n_put += min(len(records), n_free)
            if len(records) > n_free:
                self._report_loss()
            self._n_lost += max(0, len(records) - n_free)
            if self._held_for is None:
                self._n_released = self._n_put
            self._work()

    def _report_loss(self) -> None:
        """Warns when records begin to be lost, once until writing works again."""
        if not self._is_losing:
            _log.warning(
                "%s: %d records are waiting to be written, the limit. New ones are lost until "
                "writing works again.",
                self._name,
                self._max_pending,
            )
        self._is_losing = True

    def flush(self, timeout_seconds: float = GRACE_SECONDS) -> bool:
        """Waits until all records put so far are safe.

        Returns:
            Whether they are; False if the sink is failing, or does not end in time.
        """
        self._release(self._n_put)
        return self._wait_for(self._n_put, timeout_seconds)

    def _release(self, n: int) -> None:
        """Lets the first `n` records be written."""
        with self._changed:
            self._n_released = max(self._n_released, n)
            if not self._is_closed:
                self._work()

    def close(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Writes what is pending, with one last attempt if the sink is failing, and closes it.

        The thread closes the sink too, which may take longer than the caller waits.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = self._is_closing = True
            self._n_to_sync = self._n_released = self._n_put
            self._work()
            self._changed.wait_for(lambda: self._thread is None, grace_seconds)
            n_lost = self._n_lost + self._n_put - self._n_safe
        _outboxes.discard(self)
        if self._held_for is None and n_lost:
            _log.warning("%s: %d records could not be written.", self._name, n_lost)
        elif self._held_for is not None and (n_lost or not self._is_sink_closed):
            _log.warning(
                "%s: not everything was sent. The next start of the run sends the rest.", self._name
            )

    def _wait_for(self, n: int, timeout_seconds: float) -> bool:
        with self._changed:
            if self._is_closed:
                return self._n_safe >= n
            self._n_to_sync = max(self._n_to_sync, n)
            self._work()
            is_over = self._changed.wait_for(
                lambda: self._n_safe >= n or self._is_failing, timeout_seconds
            )
            if not is_over:
                self._report(f"did not finish writing within {timeout_seconds:g} seconds")
            return self._n_safe >= n

    def _work(self) -> None:
        """Wakes or starts the thread if there is work for it."""
        if not (self._has_work() or self._is_closing):
            return
        if self._thread is not None:
            self._changed.notify_all()
            return
        self._thread = threading.Thread(target=self._run, name="tekoa-sink", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # At the end of the program Python starts no threads.
            self._thread = None
            self._attempt()
            if self._is_closing:
                self._close_sink()

    def _has_work(self) -> bool:
        return self._n_released > self._n_written or self._n_to_sync > self._n_safe

    def _run(self) -> None:
        while True:
            is_last = self._is_closing  # An attempt that began before `close` is not the last.
            is_done = self._attempt()
            with self._changed:
                if is_done:
                    # To start a thread for each checkpoint would hold up training. It ends when
                    # idle, so that a forgotten outbox can be collected.
                    self._changed.wait_for(
                        lambda: self._has_work() or self._is_closing, IDLE_SECONDS
                    )
                    if self._has_work():
                        continue
                if self._is_closing and (is_done or is_last):
                    break
                if is_done:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._changed.wait_for(lambda: self._is_closing, RETRY_SECONDS)
        self._close_sink()
        with self._changed:
            self._thread = None
            self._changed.notify_all()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
            self._is_sink_closed = True
        except Exception as error:
            if not self._is_failing:
                _log.warning("%s: %s: %s", self._name, type(error).__name__, error)

    def _attempt(self) -> bool:
        """Writes and syncs what is pending; returns whether that succeeded."""
        with self._changed:
            n_released = self._n_released - self._n_written
            records = list(itertools.islice(self._pending, n_released))
            n_to_sync = self._n_to_sync
        try:
            if records:
                self._sink.write(records)
                with self._changed:
                    for _ in records:
                        self._pending.popleft()
                    self._n_written += len(records)
            if n_to_sync > self._n_safe:
                self._sink.sync()
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}")
            return False
        with self._changed:
            self._n_safe = self._n_written if n_to_sync > self._n_safe else self._n_safe
            self._is_losing = False
            if self._is_failing:
                self._is_failing = False
                _log.warning("%s: writing works again.", self._name)
            self._changed.notify_all()
        return True

    def _report(self, problem: str) -> None:
        """Warns once, until writing works again."""
        with self._changed:
            if not self._is_failing:
                _log.warning(
                    "%s: %s. Training continues; up to %d records are kept and written later.",
                    self._name,
                    problem,
                    self._max_pending,
                )
            self._is_failing = True
            self._changed.notify_all()


def barrier(timeout_seconds: float = GRACE_SECONDS) -> Callable[[], None]:
    """Returns a function that waits until all records put so far, in any outbox, are safe.

    It gives up on a sink that is failing, or that does not end in time.
    """
    targets = [(outbox, outbox._n_put) for outbox in list(_outboxes) if outbox._held_for is None]

    def wait() -> None:
        for outbox, n in targets:
            outbox._wait_for(n, timeout_seconds)

    return wait


def release(directory: pathlib.Path) -> Callable[[], None]:
    """Returns a function that releases the records put so far that are held for a directory."""
    directory = directory.resolve()
    targets = [
        (outbox, outbox._n_put) for outbox in list(_outboxes) if outbox._held_for == directory
    ]

    def let_go() -> None:
        for outbox, n in targets:
            outbox._release(n)

    return let_go


def _close_all() -> None:
    for outbox in list(_outboxes):
        outbox.close()
