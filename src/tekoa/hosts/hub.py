"""The hub of a group, in process 0: gathers values and detects lost processes.

Messages are lines of JSON on one TCP connection per process. A closed connection means that
a process died; missing heartbeats mean that it hangs. They are counted in ticks of the hub's
own timer, so that a hub that was itself suspended does not report others as hung on waking.
"""

import asyncio
import dataclasses
import json
import logging
import math
import threading
import time
from typing import Any

TICK_SECONDS = 0.5
# A line may contain the table of all files of a step.
MAX_LINE = 1 << 26
# How long processes that failed together have to report their own exit codes.
GRACE_SECONDS = 5.0
_WARN_SECONDS = 30.0

_log = logging.getLogger("tekoa.hosts")


@dataclasses.dataclass
class _Peer:
    """A process of the group."""

    index: int
    who: str
    writer: asyncio.StreamWriter
    n_silent_ticks: int = 0
    count: int | None = None
    code: int | None = None
    why: str = ""
    is_connected: bool = True


@dataclasses.dataclass
class _Gathering:
    """The values of an exchange that not all processes have reached."""

    name: str
    timeout_seconds: float
    start: float
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    has_warned: bool = False


class Hub:
    """Serves the processes of a group, in its own thread.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 selects a free one.
        n_processes: Number of processes of the group.
        timeout_seconds: Seconds without a heartbeat before a process is considered hung.

    Attributes:
        port: The port it listens on.

    Raises:
        OSError: If the port is in use.
    """

    def __init__(self, host: str, port: int, *, n_processes: int, timeout_seconds: float):
        self._n = n_processes
        self._n_ticks = max(2, round(timeout_seconds / TICK_SECONDS))
        self._timeout_seconds = timeout_seconds
        self._peers: dict[int, _Peer] = {}
        self._gatherings: dict[str, _Gathering] = {}
        self._stop_by: dict[str, Any] | None = None
        self._ending: float | None = None
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, host, port, limit=MAX_LINE)
            )
        except OSError:
            self._loop.close()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="tekoa-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and closes all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        tasks = [self._loop.create_task(self._watch())]
        self._loop.run_forever()
        self._server.close()
        tasks += asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = None
        try:
            async for line in reader:
                message = json.loads(line)
                if peer is None:
                    peer = self._admit(message, writer)
                    if peer is None:
                        break
                else:
                    peer.n_silent_ticks = 0
                    self._receive(peer, message)
        except asyncio.CancelledError:
            return  # The hub is being closed.
        except (OSError, ValueError) as error:
            _log.warning("Connection of a process broken: %s", error)
        finally:
            writer.close()
        if peer is not None:
            peer.is_connected = False
            if peer.code is None:
                self._lose(f"{peer.who} disconnected unexpectedly.", but=peer.index)

    def _admit(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> _Peer | None:
        index, n = message["hello"], message["of"]
        who = f"process {index} (pid {message['pid']} on {message['host']})"
        reason = None
        if n != self._n:
            reason = f"Process 0 expects {self._n} processes, but {who} expects {n}."
        elif index in self._peers:
            reason = f"{self._peers[index].who} has joined already, so {who} cannot."
        elif not 0 <= index < n:
            reason = f"The index of {who} must be 0 to {n - 1}."
        if reason is not None:
            _write(writer, _line({"refused": reason}))
            return None
        peer = self._peers[index] = _Peer(index, who, writer)
        if len(self._peers) == self._n:
            self._broadcast({"welcome": [self._peers[i].who for i in range(self._n)]})
        return peer

    def _receive(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "at" in message:
            self._gather(peer, message)
        elif "ask_stop" in message and self._stop_by is None:
            self._stop_by = {"who": peer.who, "signal": message["ask_stop"]}
            self._broadcast({"hold": True})
        elif "count" in message:
            peer.count = message["count"]
            counts = [p.count for p in self._peers.values() if p.count is not None]
            if len(counts) == self._n:
                # The first poll that no process has passed yet.
                self._broadcast({"stop_at": max(counts) + 1, **(self._stop_by or {})})
        elif "bye" in message:
            peer.code, peer.why = message["bye"], message["why"]
            if peer.code and self._ending is None:
                self._ending = time.monotonic()
            ended = [other for other in self._peers.values() if other.code is not None]
            if len(ended) == self._n:
                self._end({"over": True})

    def _gather(self, peer: _Peer, message: dict[str, Any]) -> None:
        name = message["at"]
        if name not in self._gatherings:
            self._gatherings[name] = _Gathering(name, message["timeout"], time.monotonic())
        gathering = self._gatherings[name]
        gathering.values[peer.index] = message["value"]
        if len(gathering.values) == self._n:
            del self._gatherings[name]
            values = [gathering.values[i] for i in range(self._n)]
            self._broadcast({"all": name, "values": values})

    async def _watch(self) -> None:
        while not self._is_over:
            await asyncio.sleep(TICK_SECONDS)
            if len(self._peers) == self._n:
                self._broadcast({"beat": True})
                self._check_heartbeats()
                self._check_exchanges()
                self._check_failures()

    def _check_heartbeats(self) -> None:
        for peer in self._peers.values():
            peer.n_silent_ticks += 1
            if peer.code is None and peer.n_silent_ticks > self._n_ticks:
                self._lose(
                    f"{peer.who} hangs: no heartbeat for {self._timeout_seconds:g} s.",
                    but=peer.index,
                )

    def _check_exchanges(self) -> None:
        for gathering in self._gatherings.values():
            waited = time.monotonic() - gathering.start
            missing = [p for p in self._peers.values() if p.index not in gathering.values]
            names = ", ".join(peer.who for peer in missing)
            is_bounded = gathering.timeout_seconds < math.inf
            if is_bounded and waited > _WARN_SECONDS and not gathering.has_warned:
                gathering.has_warned = True
                _log.warning("%r has waited %.0f s for %s.", gathering.name, waited, names)
            if waited > gathering.timeout_seconds:
                self._lose(
                    f"{names} did not reach {gathering.name!r} within "
                    f"{gathering.timeout_seconds:g} s.",
                    but=missing[0].index,
                )

    def _check_failures(self) -> None:
        if self._ending is not None and time.monotonic() - self._ending > GRACE_SECONDS:
            failed = [p for p in self._peers.values() if p.code]
            reasons = (f"{p.who} exited with code {p.code}. {p.why}".strip() for p in failed)
            self._lose(" ".join(reasons))

    def _lose(self, reason: str, *, but: int | None = None) -> None:
        """Ends the group after the loss of a process.

        Args:
            reason: What happened.
            but: The process that cannot receive the message.
        """
        if len(self._peers) == self._n:
            self._end({"lost": reason}, but=but)

    def _end(self, message: dict[str, Any], *, but: int | None = None) -> None:
        if self._is_over:
            return
        self._is_over = True
        others = [peer for peer in self._peers.values() if peer.index != 0]
        for peer in others:
            _write(peer.writer, _line(message))
        reachable = [peer for peer in others if peer.index != but]
        # Referenced, or the task could be garbage-collected before it runs.
        self._end_task = self._loop.create_task(self._end_own(message, reachable))

    async def _end_own(self, message: dict[str, Any], others: list[_Peer]) -> None:
        """Ends process 0 last: without it JAX aborts the others with its own exit code."""
        for _ in range(20):
            if not any(peer.is_connected for peer in others):
                break
            await asyncio.sleep(0.1)
        _write(self._peers[0].writer, _line(message))

    def _broadcast(self, message: dict[str, Any]) -> None:
        line = _line(message)
        for peer in self._peers.values():
            _write(peer.writer, line)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _write(writer: asyncio.StreamWriter, line: bytes) -> None:
    if not writer.is_closing():
        writer.write(line)
