"""A process's connection to the hub of its group."""

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

from tekoa.core import hosts_hub


class RefusedError(RuntimeError):
    """The hub does not take this process."""


class Link:
    """Talks to the hub; ends the process through `on_lost` when the group falls apart.

    Args:
        addresses: Host and port of the hub; tried in turn.
        index: The number of this process.
        n_processes: How many there are.
        timeout_seconds: Silence of the hub after which it counts as stuck.
        start_timeout_seconds: How long to wait for the hub and for everybody.
        on_lost: Called with the reason, in a thread of this link.

    Attributes:
        who: Every process in words, by number.
        stopped_by: Who asked for a stop, and by which signal; empty before.
        signal_name: Gives the signal that this process got, None if it got none; looked at
            also while the program polls nothing.

    Raises:
        RefusedError: If the numbers of the processes do not fit together.
        TimeoutError: If not everybody came.
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
        self._n_ticks = max(2, round(timeout_seconds / hosts_hub.TICK_SECONDS))
        self._timeout_seconds = timeout_seconds
        self._n_silent_ticks = 0
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._waiting: dict[str, concurrent.futures.Future[list[Any]]] = {}
        self._n_uses: collections.Counter[str] = collections.Counter()
        self._n_polls, self._has_asked = 0, False
        self._stop_at: int | None = None
        self.stopped_by: dict[str, Any] = {}
        self.signal_name: Callable[[], str | None] = lambda: None
        self._is_leaving, self._is_over = False, threading.Event()
        deadline = time.monotonic() + start_timeout_seconds
        self._socket = _connect(addresses, deadline)
        me = {"hello": index, "of": n_processes, "pid": os.getpid(), "host": socket.gethostname()}
        self._send(me)
        self._lines = self._socket.makefile("rb")
        try:
            self.who = self._welcomed(deadline)
        except BaseException:
            self._lines.close()
            self._socket.close()
            raise
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="tekoa-link", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name="tekoa-beat", daemon=True).start()

    def _welcomed(self, deadline: float) -> list[str]:
        self._socket.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            line = self._lines.readline(hosts_hub.MAX_LINE)
        except TimeoutError:
            raise TimeoutError("not all processes came in time") from None
        if not line:
            raise RefusedError("Process 0 ended while the others were gathering.")
        message = json.loads(line)
        if "refused" in message:
            raise RefusedError(message["refused"])
        return message["welcome"]

    def exchange(self, name: str, value: Any, *, timeout_seconds: float) -> list[Any]:
        """Gives the values of all processes, in their order, once all have come here.

        Args:
            name: What this is about; the same on all.
            value: JSON data.
            timeout_seconds: How long the first may wait for the last; past it the group
                is at its end.
        """
        with self._sending:
            self._n_uses[name] += 1
            key = name if self._n_uses[name] == 1 else f"{name} ({self._n_uses[name]})"
            found = self._waiting[key] = concurrent.futures.Future()
        self._send({"at": key, "value": value, "timeout": timeout_seconds})
        return found.result()

    def is_stop_due(self, signal_name: str | None) -> bool:
        """Tells all processes at the same call, counted from the start, that one must stop.

        Args:
            signal_name: The signal that asked this process to stop, None if there was none.
        """
        with self._counting:
            self._n_polls += 1
            if signal_name is not None:
                self._ask_stop(signal_name)
            return self._stop_at is not None and self._n_polls >= self._stop_at

    def is_stop_agreed(self, signal_name: str | None) -> bool:
        """Tells whether the moment to stop is known; the next poll is then such a moment."""
        if signal_name is not None:
            self._ask_stop(signal_name)
        return bool(self.stopped_by)

    def _ask_stop(self, signal_name: str) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._send({"ask_stop": signal_name})

    def leave(self, code: int, why: str = "") -> None:
        """Says that this process ends; waits until all do, for some seconds if it failed."""
        self._is_leaving = True
        self._send({"bye": code, "why": why[:1000]})
        self._is_over.wait(None if code == 0 else 2 * hosts_hub.GRACE_SECONDS)
        self.close()

    def close(self) -> None:
        """Closes the connection; process 0 waits for it before it ends."""
        self._is_leaving = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()

    def _read(self) -> None:
        reason = "its connection closed"
        try:
            while line := self._lines.readline(hosts_hub.MAX_LINE):
                self._n_silent_ticks = 0
                self._receive(json.loads(line))
        except (OSError, ValueError) as error:
            reason = str(error)
        self._lose(f"{self.who[0]} is gone: {reason}.")
        self._lines.close()
        self._socket.close()

    def _receive(self, message: dict[str, Any]) -> None:
        if "all" in message:
            self._waiting.pop(message["all"]).set_result(message["values"])
        elif "hold" in message:
            # Nobody passes another poll until the moment to stop at is known.
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
        while not self._is_over.wait(hosts_hub.TICK_SECONDS):
            self._send({"beat": True})
            if (name := self.signal_name()) is not None:
                self._ask_stop(name)
            self._n_silent_ticks += 1
            if self._n_silent_ticks > self._n_ticks:
                self._lose(
                    f"{self.who[0]} is stuck: no sign of life for {self._timeout_seconds:g} s."
                )

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
            return  # The reader sees the same, and tells.


def _connect(addresses: Sequence[tuple[str, int]], deadline: float) -> socket.socket:
    for address in itertools.cycle(addresses):
        try:
            found = socket.create_connection(address, timeout=5)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process 0 does not answer at {address}: {error}") from None
            time.sleep(0.1)
    raise ValueError("There is no address to connect to.")
