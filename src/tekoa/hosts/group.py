"""The group of processes that train together, and how they agree.

`jax.distributed` connects their devices. Everything else that the processes must agree on (a seed,
the step to restore, when to stop, whether all have written their part of a checkpoint) goes over
its coordination service, beside the devices. The same service detects processes that died or
hang: JAX then aborts the others. What Tekoa notices itself ends with `EXIT_PEER_LOST`.

A single process is a group too, and exchanges nothing.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tekoa.hosts import connect
from tekoa.hosts.channel import Channel, open_channel
from tekoa.hosts.connect import HostsError as HostsError

# EX_UNAVAILABLE of sysexits: something that the program needs, here a process, is missing.
EXIT_PEER_LOST = 69
# EX_TEMPFAIL of sysexits: stopped, and can be resumed.
EXIT_STOPPED = 75
# How long the first process may wait for the last; writing a large shard takes long.
EXCHANGE_SECONDS = 1800.0
AUTO = "auto"

# A wait blocks for this long, then polls: see `Channel.get`.
_BLOCK_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 2.0
_WARN_SECONDS = 30.0
# How long process 0, whose end aborts the others, waits for them after a failure.
_GRACE_SECONDS = 3.0
_FAILURE, _MEMBERS, _LEAVING = "failure", "members", "leaving"
_log = logging.getLogger("tekoa.hosts")


class Hosts:
    """The processes that run this program together, as seen by one of them.

    Args:
        index: The index of this process, from 0.
        count: The number of processes.
        channel: The connection to the others; None for a single process.

    Attributes:
        address: Where they have joined, as given to `join`.
    """

    def __init__(self, *, index: int = 0, count: int = 1, channel: Channel | None = None):
        self.index, self.count, self.address = index, count, ""
        self.channel: Any = channel
        self._n_polls, self._is_stopped = 0, False

    @property
    def is_writer(self) -> bool:
        """Whether this is process 0, which writes logs, metrics, predictions and commits."""
        return self.index == 0

    def gather(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> list[Any] | None:
        """Returns the values of all processes on process 0; on the others None, without waiting.

        This and the other exchanges can be called in any thread. All processes must make the
        exchanges of a name in the same order.

        Args:
            name: The purpose, for messages about processes that are missing.
            value: JSON data.
            timeout_seconds: How long process 0 may wait for the last. After that, it exits with
                `EXIT_PEER_LOST`, and so do the others.
        """
        if self.channel is None:
            return [value]
        with self._service_needed():
            key = self.channel.new_key(f"gather/{name}")
            if not self.is_writer:
                self.channel.put(f"{key}/{self.index}", value)
                return None
            others = self._receive(name, key, range(1, self.count), timeout_seconds)
            self.channel.drop(key)
            return [value, *others]

    def broadcast(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> Any:
        """Returns the value of process 0 on all processes; other values are ignored."""
        if self.channel is None:
            return value
        with self._service_needed():
            key = self.channel.new_key(f"broadcast/{name}")
            if self.is_writer:
                self._check_failure()  # A process 0 that never waits notices a failure here.
                self.channel.put(f"{key}/0", value)
                return value
            # Process 0 may itself wait for others as long.
            (received,) = self._receive(name, key, [0], timeout_seconds + 60)
            if self.channel.count(f"{key}/n_read") == self.count - 1:
                self.channel.drop(key)
            return received

    def exchange(
        self, name: str, value: Any = None, *, timeout_seconds: float = EXCHANGE_SECONDS
    ) -> list[Any]:
        """Waits for all processes and returns their values, in the order of processes."""
        values = self.gather(name, value, timeout_seconds=timeout_seconds)
        return self.broadcast(name, values, timeout_seconds=timeout_seconds)

    def agree(self, name: str, value: Mapping[str, Any]) -> None:
        """Checks that all processes have the same values.

        Raises:
            HostsError: On all processes, if the values differ.
        """
        text = json.dumps(value, sort_keys=True)
        digests = self.gather(name, hashlib.sha256(text.encode()).hexdigest()) or []
        odd = self.broadcast(name, next((i for i, d in enumerate(digests) if d != digests[0]), 0))
        if odd:
            own = json.loads(text) if self.index in (0, odd) else None
            values = self.exchange(f"{name} of {odd}", own)
            differ = [k for k in values[0] if values[odd].get(k) != values[0][k]]
            a, b = ({key: values[i].get(key) for key in differ} for i in (0, odd))
            raise HostsError(
                f"The processes differ in {name}: process 0 has {a}, process {odd} has {b}. "
                "Start all of them with the same command."
            )

    def is_stop_due(self) -> bool:
        """Returns whether to stop because of a signal to any process.

        The n-th call returns the same on all processes, which must call it equally often.
        """
        from jax.experimental import multihost_utils

        self._n_polls += 1
        if not self._is_stopped and self.count > 1:
            self._is_stopped = multihost_utils.reached_preemption_sync_point(self._n_polls)
        return self._is_stopped

    def leave(self, code: int, why: str = "") -> None:
        """Leaves the group; waits for the other processes, unless this one failed.

        If `code` is not 0 this exits. After a failure JAX would wait for the other processes; after
        a stop all exit at once, before a scheduler that sees the first of them kills the rest.
        """
        if self.channel is None:
            return
        if code not in (0, EXIT_STOPPED):
            failure = {"index": self.index, "code": code, "why": why[:1000]}
            with contextlib.suppress(RuntimeError):  # Another process failed first.
                self.channel.put(_FAILURE, failure)
            self._exit(code)
        self.exchange("end of the program", timeout_seconds=math.inf)
        _joined.clear()
        if code != 0:
            import jax

            sys.stdout.flush()
            sys.stderr.flush()
            jax.distributed.shutdown()
            os._exit(code)

    def _receive(
        self, name: str, key: str, senders: Sequence[int], limit_seconds: float
    ) -> list[Any]:
        """Waits for the values `key/sender` of other processes; exits if one of them is lost."""
        start, has_warned, values = time.monotonic(), False, []
        for sender in senders:
            seconds = _BLOCK_SECONDS
            while True:
                with contextlib.suppress(TimeoutError):
                    values.append(self.channel.get(f"{key}/{sender}", timeout_seconds=seconds))
                    break
                self._check_failure()
                seconds, waited = 0.0, time.monotonic() - start
                if waited > limit_seconds:
                    missing = self._missing(key, senders)
                    self._end(f"{missing} did not reach {name!r} within {waited:.0f} s.")
                if waited > _WARN_SECONDS and not has_warned:
                    has_warned, missing = True, self._missing(key, senders)
                    _log.warning("%r has waited %.0f s for %s.", name, waited, missing)
                time.sleep(min(_MAX_PAUSE_SECONDS, waited / 10))
        return values

    @contextlib.contextmanager
    def _service_needed(self) -> Iterator[None]:
        """Exits if the service fails in the `with` block."""
        try:
            yield
        except RuntimeError as error:
            self._end(f"The service in process 0 failed: {str(error).splitlines()[0]}.")

    def _check_failure(self) -> None:
        """Exits if another process failed."""
        with contextlib.suppress(TimeoutError):
            failure = self.channel.get(_FAILURE)
            if failure["index"] != self.index:
                who = self._describe([failure["index"]])
                self._end(f"{who} exited with code {failure['code']}. {failure['why']}".strip())

    def _missing(self, key: str, senders: Sequence[int]) -> str:
        present = self.channel.list(key)
        return self._describe([i for i in senders if str(i) not in present])

    def _describe(self, indices: Sequence[int]) -> str:
        members = self.channel.list(_MEMBERS)
        return ", ".join(f"process {i} ({members.get(str(i), 'unknown')})" for i in indices)

    def _end(self, reason: str) -> NoReturn:
        """Exits: a collective operation would wait forever for the lost process."""
        print(
            f"tekoa: {reason} Exiting with code {EXIT_PEER_LOST}. Committed checkpoints are "
            "intact; restart all processes to resume.",
            file=sys.stderr,
        )
        self._exit(EXIT_PEER_LOST)

    def _exit(self, code: int) -> NoReturn:
        """Exits without cleanup; process 0 last, so that the others keep their exit codes."""
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(RuntimeError):
            self.channel.put(f"{_LEAVING}/{self.index}", code)
            end = time.monotonic() + _GRACE_SECONDS
            while self.is_writer and time.monotonic() < end:
                if len(self.channel.list(_LEAVING)) == self.count:
                    break
                time.sleep(0.05)
        os._exit(code)


_joined: list[Hosts] = []


def current() -> Hosts:
    """Returns the group that this process has joined, or a group of this process alone."""
    return _joined[0] if _joined else Hosts()


def join(
    address: str,
    n_processes: int | None = None,
    index: int | None = None,
    *,
    timeout_seconds: float = 60.0,
    start_timeout_seconds: float = 300.0,
) -> Hosts:
    """Joins the group and connects the devices. Must be called before any use of JAX.

    Args:
        address: `host:port` of process 0, which listens on this port; or "auto" if JAX can detect
            the cluster (SLURM, Kubernetes, TPU pods).
        n_processes: Number of processes; not used with "auto".
        index: Index of this process, from 0; not used with "auto".
        timeout_seconds: Seconds without a heartbeat before a process is considered hung.
        start_timeout_seconds: How long to wait for all processes to start.

    Raises:
        HostsError: If the processes cannot form a group.
    """
    import jax

    arguments = {}
    if address != AUTO:
        arguments = connect.prepare(address, n_processes, index, start_timeout_seconds)
    connect.initialise_jax(
        **arguments,
        initialization_timeout=round(start_timeout_seconds),
        heartbeat_timeout_seconds=max(1, round(timeout_seconds)),
        shutdown_timeout_seconds=max(1, round(timeout_seconds)),
    )
    group = Hosts(index=jax.process_index(), count=jax.process_count(), channel=open_channel())
    group.address = address
    group.channel.put(f"{_MEMBERS}/{group.index}", f"pid {os.getpid()} on {socket.gethostname()}")
    # Joined from here on, so that a failure below is reported to the others.
    _joined[:] = [group]
    connect.connect_devices()
    return group


def is_failed_collective(error: BaseException) -> bool:
    """Returns whether a computation failed because another process did not take part in it."""
    import jax

    text = str(error)
    # JAX raises a ValueError if an operation fails while it is dispatched.
    of_dispatch = isinstance(error, ValueError) and text.startswith("UNKNOWN: ")
    words = ("gloo", "nccl", "rccl", "collective", "connection")
    is_lost = any(word in text.lower() for word in words)
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError) or of_dispatch
    return current().count > 1 and is_of_jax and is_lost
