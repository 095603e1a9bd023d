"""Process 0's side of a group of processes: gathers values, notices who is gone.

Messages are lines of JSON on one TCP connection per process. A closed connection is a
process that died; silence is one that is stuck. Silence is counted in ticks of the hub's
own clock work, so that a hub that was stopped itself accuses nobody when it goes on.
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
# A table of all files of a step goes in one line.
MAX_LINE = 1 << 26
# Within this time processes that failed together may each tell its own code.
GRACE_SECONDS = 5.0
_TELL_SECONDS = 30.0

_log = logging.getLogger("tekoa.hosts")


@dataclasses.dataclass
class _Peer:
    """A process as the hub knows it."""

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
    """Values of an exchange that not everybody has reached."""

    name: str
    timeout_seconds: float
    began: float
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    is_told: bool = False


class Hub:
    """Listens for the processes of a group, in a thread of its own.

    Args:
        host: Address to listen at.
        port: Port to listen at; 0 takes any that is free.
        n_processes: How many processes belong together.
        timeout_seconds: Silence after which a process counts as stuck.

    Attributes:
        port: Where it listens.

    Raises:
        OSError: If the port is taken.
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
        """Ends the thread and all connections."""
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
            _log.warning("a connection of the group broke: %s", error)
        finally:
            writer.close()
        if peer is not None:
            peer.is_connected = False
            if peer.code is None:
                self._lose(f"{peer.who} is gone: it ended without a word.", but=peer.index)

    def _admit(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> _Peer | None:
        index, n = message["hello"], message["of"]
        who = f"process {index} (number {message['pid']} on {message['host']})"
        reason = None
        if n != self._n:
            reason = f"process 0 was told of {self._n} processes, {who} of {n}"
        elif index in self._peers:
            reason = f"there is a {self._peers[index].who} already, and now a second {who}"
        elif not 0 <= index < n:
            reason = f"{n} processes are numbered 0 to {n - 1}, and this is {who}"
        if reason is not None:
            _write(writer, _line({"refused": f"The processes do not fit together: {reason}."}))
            return None
        peer = self._peers[index] = _Peer(index, who, writer)
        if len(self._peers) == self._n:
            self._tell({"welcome": [self._peers[i].who for i in range(self._n)]})
        return peer

    def _receive(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "at" in message:
            self._gather(peer, message)
        elif "ask_stop" in message and self._stop_by is None:
            self._stop_by = {"who": peer.who, "signal": message["ask_stop"]}
            self._tell({"hold": True})
        elif "count" in message:
            peer.count = message["count"]
            counts = [p.count for p in self._peers.values() if p.count is not None]
            if len(counts) == self._n:
                # The first moment that nobody has passed yet.
                self._tell({"stop_at": max(counts) + 1, **(self._stop_by or {})})
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
            self._tell({"all": name, "values": values})

    async def _watch(self) -> None:
        while not self._is_over:
            await asyncio.sleep(TICK_SECONDS)
            if len(self._peers) == self._n:
                self._tell({"beat": True})
                self._look_for_silence()
                self._look_for_missing()
                self._look_for_ended()

    def _look_for_silence(self) -> None:
        for peer in self._peers.values():
            peer.n_silent_ticks += 1
            if peer.code is None and peer.n_silent_ticks > self._n_ticks:
                self._lose(
                    f"{peer.who} is stuck: no sign of life for {self._timeout_seconds:g} s.",
                    but=peer.index,
                )

    def _look_for_missing(self) -> None:
        for gathering in self._gatherings.values():
            waited = time.monotonic() - gathering.began
            missing = [p for p in self._peers.values() if p.index not in gathering.values]
            names = ", ".join(peer.who for peer in missing)
            is_bounded = gathering.timeout_seconds < math.inf
            if is_bounded and waited > _TELL_SECONDS and not gathering.is_told:
                gathering.is_told = True
                _log.warning("%r waits for %s since %.0f s", gathering.name, names, waited)
            if waited > gathering.timeout_seconds:
                self._lose(
                    f"{names} did not come to {gathering.name!r} within "
                    f"{gathering.timeout_seconds:g} s.",
                    but=missing[0].index,
                )

    def _look_for_ended(self) -> None:
        if self._ending is not None and time.monotonic() - self._ending > GRACE_SECONDS:
            ended = [p for p in self._peers.values() if p.code]
            told = " ".join(f"{p.who} ended with code {p.code}. {p.why}".strip() for p in ended)
            self._lose(told)

    def _lose(self, reason: str, *, but: int | None = None) -> None:
        """Tells everybody that the group is at its end.

        Args:
            reason: What happened.
            but: The process that will not hear it.
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
        heard = [peer for peer in others if peer.index != but]
        self._last_words = self._loop.create_task(self._end_own(message, heard))

    async def _end_own(self, message: dict[str, Any], others: list[_Peer]) -> None:
        """Lets process 0 end last: JAX would abort the others with a code of its own."""
        for _ in range(20):
            if not any(peer.is_connected for peer in others):
                break
            await asyncio.sleep(0.1)
        _write(self._peers[0].writer, _line(message))

    def _tell(self, message: dict[str, Any]) -> None:
        line = _line(message)
        for peer in self._peers.values():
            _write(peer.writer, line)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _write(writer: asyncio.StreamWriter, line: bytes) -> None:
    if not writer.is_closing():
        writer.write(line)
