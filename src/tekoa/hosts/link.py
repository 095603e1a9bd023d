"""The connection of a process to the hub of its group."""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tekoa.hosts import hub


class RefusedError(RuntimeError):
    """The hub refuses this process."""


class Link:
    """Exchanges messages with the hub; calls `on_lost` when a process is lost.

    Args:
        addresses: Host and port of the hub; tried in turn.
        index: The index of this process.
        n_processes: Number of processes of the group.
        timeout_seconds: Seconds without a heartbeat before the hub is considered hung.
        start_timeout_seconds: How long to wait for the hub and for all processes.
        on_lost: Called with the reason, in a thread of this link.

    Attributes:
        who: A description of every process, by index.
        stopped_by: The process and signal that requested a stop; empty before.
        signal_name: Returns the signal that this process received, or None; also called while
            the program does not poll.

    Raises:
        RefusedError: If the hub does not accept the index or the number of processes.
        TimeoutError: If not all processes joined in time.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        index: int,
        n_processes: int,
        timeout_seconds: float,
        start_timeout_seconds: float,
        on_lost: Callable[[str], None],
    ):
        self._on_lost = on_lost
        self._n_ticks = max(2, round(timeout_seconds / hub.TICK_SECONDS))
        self._timeout_seconds = timeout_seconds
        self._n_silent_ticks = 0
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._waiting: dict[str, concurrent.futures.Future[list[Any]]] = {}
        self._n_uses: collections.Counter[str] = collections.Counter()
        self._n_polls, self._has_requested_stop = 0, False
        self._stop_at: int | None = None
        self.stopped_by: dict[str, Any] = {}
        self.signal_name: Callable[[], str | None] = lambda: None
        self._is_leaving, self._is_over = False, threading.Event()
        deadline = time.monotonic() + start_timeout_seconds
        self._socket = _connect(addresses, deadline)
        hello = {
            "hello": index,
            "of": n_processes,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._send(hello)
        self._lines = self._socket.makefile("rb")
        try:
            self.who = self._wait_for_welcome(deadline)
        except BaseException:
            self._lines.close()
            self._socket.close()
            raise
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="tekoa-link", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name="tekoa-beat", daemon=True).start()

    def _wait_for_welcome(self, deadline: float) -> list[str]:
        self._socket.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            line = self._lines.readline(hub.MAX_LINE)
        except TimeoutError:
            raise TimeoutError("not all processes joined in time") from None
        if not line:
            raise RefusedError("Process 0 exited before all processes had joined.")
        message = json.loads(line)
        if "refused" in message:
            raise RefusedError(message["refused"])
        return message["welcome"]

    def exchange(self, name: str, value: Any, *, timeout_seconds: float) -> list[Any]:
        """Waits for all processes and returns their values, in the order of processes.

        Args:
            name: The purpose, the same on all processes.
            value: JSON data.
            timeout_seconds: How long the first process may wait for the last; after that the
                group ends.
        """
        with self._sending:
            self._n_uses[name] += 1
            key = name if self._n_uses[name] == 1 else f"{name} ({self._n_uses[name]})"
            values = self._waiting[key] = concurrent.futures.Future()
        self._send({"at": key, "value": value, "timeout": timeout_seconds})
        return values.result()

    def is_stop_due(self, signal_name: str | None) -> bool:
        """Returns whether to stop; the n-th call returns the same on all processes.

        Args:
            signal_name: The stop signal that this process received, or None.
        """
        with self._counting:
            self._n_polls += 1
            if signal_name is not None:
                self._request_stop(signal_name)
            return self._stop_at is not None and self._n_polls >= self._stop_at

    def is_stop_agreed(self, signal_name: str | None) -> bool:
        """Returns whether a stop is agreed on, so that a later poll will return true."""
        if signal_name is not None:
            self._request_stop(signal_name)
        return bool(self.stopped_by)

    def _request_stop(self, signal_name: str) -> None:
        if not self._has_requested_stop:
            self._has_requested_stop = True
            self._send({"ask_stop": signal_name})

    def leave(self, code: int, why: str = "") -> None:
        """Leaves the group; waits until all processes leave, or some seconds after a failure."""
        self._is_leaving = True
        self._send({"bye": code, "why": why[:1000]})
        self._is_over.wait(None if code == 0 else 2 * hub.GRACE_SECONDS)
        self.close()

    def close(self) -> None:
        """Closes the connection; process 0 waits for it before it ends."""
        self._is_leaving = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()

    def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while line := self._lines.readline(hub.MAX_LINE):
                self._n_silent_ticks = 0
                self._receive(json.loads(line))
        except (OSError, ValueError) as error:
            reason = str(error)
        self._lose(f"{self.who[0]} disconnected: {reason}.")
        self._lines.close()
        self._socket.close()

    def _receive(self, message: dict[str, Any]) -> None:
        if "all" in message:
            self._waiting.pop(message["all"]).set_result(message["values"])
        elif "hold" in message:
            # No process may poll again until the hub has decided when to stop.
            self._counting.acquire()
            self._send({"count": self._n_polls})
        elif "stop_at" in message:
            self._stop_at, self.stopped_by = message["stop_at"], message
            self._counting.release()
        elif "over" in message:
            self._is_over.set()
        elif "lost" in message:
            self._lose(message["lost"])

    def _beat(self) -> None:
        while not self._is_over.wait(hub.TICK_SECONDS):
            self._send({"beat": True})
            if (name := self.signal_name()) is not None:
                self._request_stop(name)
            self._n_silent_ticks += 1
            if self._n_silent_ticks > self._n_ticks:
                self._lose(f"{self.who[0]} hangs: no heartbeat for {self._timeout_seconds:g} s.")

    def _lose(self, reason: str) -> None:
        if not self._is_over.is_set() and not self._is_leaving:
            self._on_lost(reason)
        self._is_over.set()

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            return  # The reading thread sees the same error and reports it.


def _connect(addresses: Sequence[tuple[str, int]], deadline: float) -> socket.socket:
    for address in itertools.cycle(addresses):
        try:
            connection = socket.create_connection(address, timeout=5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process 0 does not answer at {address}: {error}") from None
            time.sleep(0.1)
    raise ValueError("There is no address to connect to.")
