"""One writer per directory: the lease file, its renewal and its fence.

`writer.lease` names its owner (host, process, boot, token) and counts its renewals. A lease is
taken over only if its process is dead on this machine, or if its count has not changed for
`STALE_SECONDS` of our own clock; the clocks of two hosts are never compared. All changes to
the directory happen inside `Lease.fence()`, which checks again that the lease is still ours:
a writer that was suspended and replaced cannot commit or delete anything. One process may
hold the lease of a directory several times. One thread renews all leases of a process. The file
is never synced: after a power cut its process is gone, whatever the file contains.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import logging
import os
import pathlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from tekoa import hosts
from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable, fault_points, paths

NAME = "writer.lease"
RENEW_SECONDS = 2.0
STALE_SECONDS = 15.0
_POLL_SECONDS = 0.2
# How long to wait for another process that is changing the directory.
_LOCK_SECONDS = 4.0
_MAX_BYTES = 2**16
# What a process that is killed during a renewal leaves behind; see `durable.replace`.
_LEFTOVER = re.compile(re.escape(f".{NAME}.") + "[0-9a-f]{32}")

_log = logging.getLogger("tekoa.store")
_register_once = functools.cache(atexit.register)
_held: dict[pathlib.Path, "Lease"] = {}
_held_lock = threading.RLock()
_renewer: threading.Thread | None = None


class Lease:
    """The right to write in a directory; created by `acquire`.

    Attributes:
        directory: The directory, resolved.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._path = directory / NAME
        self._me = {
            **identity(os.getpid()),
            "group": hosts.current().address,
            "token": uuid.uuid4().hex,
            "count": 0,
        }
        self._n_holders = 1
        self._is_lost = False
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def fence(self) -> Iterator[None]:
        """Guards a change to the directory: the body runs only if the lease is still held.

        Other threads of this process are waited for as long as it takes, other processes for a
        few seconds.

        Raises:
            errors.FencedError: If the lease was lost.
            errors.LeaseHeldError: If another process does not finish its change.
        """
        with self._lock, _locked(self.directory):
            owner = _read(self._path)
            if owner is None or owner.get("token") != self._me["token"]:
                raise errors.FencedError(
                    f"{self.directory}: process {os.getpid()} lost its lease to "
                    f"{describe(owner) if owner else 'nobody (the file is gone)'}; nothing was "
                    "changed. Stop this process, because another one may be writing."
                )
            yield

    def release(self) -> None:
        """Releases the lease; the last holder in this process removes the file."""
        with _held_lock:
            self._n_holders -= 1
            if self._n_holders > 0 or self._me["pid"] != os.getpid():
                return
            _held.pop(self.directory, None)
            # With a stuck disk another thread may never leave the fence. The file then stays; it
            # is worthless once this process has ended.
            if self._lock.acquire(timeout=_LOCK_SECONDS):
                with contextlib.suppress(errors.StoreError, OSError), self.fence():
                    self._path.unlink()
                self._lock.release()

    def _sweep(self) -> None:
        """Removes what killed writers left; only while this process writes nothing here yet."""
        with self.fence():  # This process renews the lease there too.
            steps = [p for kind in ("tmp", "trash") for p in paths.unfinished(self.directory, kind)]
            with os.scandir(self.directory) as entries:
                renewals = [
                    self.directory / entry.name
                    for entry in entries
                    if _LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                ]
        # Outside the fence, which the renewal of the lease needs: this may take long.
        for path in (*steps, *renewals):
            durable.remove(path, on_file=lambda: fault_points.reach("mid_gc"))
        if steps:
            _log.warning("%s: removed %d unfinished steps", self.directory, len(steps))

    def _renew(self) -> None:
        if self._is_lost or self._me["pid"] != os.getpid():
            return
        try:
            with self.fence():
                self._me["count"] += 1
                durable.replace(self._path, json.dumps(self._me).encode(), sync=False)
        except errors.FencedError as error:
            if _held.get(self.directory) is self:  # Else it was just released.
                self._is_lost = True
                _log.error("%s", error)
        except (errors.LeaseHeldError, OSError):
            pass  # A full disk or a slow process must not end the renewal.


def acquire(directory: str | os.PathLike[str]) -> Lease:
    """Acquires the lease of a directory, creating the directory if needed.

    A lease that is new to this process removes what killed writers left in the directory.

    Args:
        directory: The directory to write in.

    Raises:
        errors.LeaseHeldError: If another living process holds it; within 5 seconds on this
            machine, and `STALE_SECONDS` if the holder is on another one or unknown.
        errors.StoreError: If the directory is not writable.
    """
    path = files.local_path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        path = path.resolve()
        with _held_lock:
            lease = _held.get(path)
            # A forked child does not hold the leases of its parent.
            if lease is not None and lease._me["pid"] == os.getpid():
                lease._n_holders += 1
                return lease
            lease = Lease(path)
            _take(lease)
            _held[path] = lease
            _register_once(_release_all)
            _start_renewals()
        lease._sweep()
        return lease
    except OSError as error:
        raise errors.StoreError(
            f"Cannot write to {path}, so checkpoints could not be saved: {error}. Choose a "
            "directory that this user may write to."
        ) from error


def _start_renewals() -> None:
    """Starts the thread that renews all leases of this process, unless it runs."""
    global _renewer
    if _renewer is None or not _renewer.is_alive():  # A forked child has no threads.
        _renewer = threading.Thread(target=_renew_all, name="tekoa-lease", daemon=True)
        _renewer.start()


def _renew_all() -> None:
    pause = threading.Event()
    while not pause.wait(RENEW_SECONDS):
        for lease in list(_held.values()):
            lease._renew()


@contextlib.contextmanager
def held(directory: str | os.PathLike[str]) -> Iterator[Lease]:
    """Holds the lease of a directory during a `with` block; see `acquire`."""
    lease = acquire(directory)
    try:
        yield lease
    finally:
        lease.release()


def _release_all() -> None:
    for lease in list(_held.values()):
        lease._n_holders = 1
        lease.release()


def _take(lease: Lease) -> None:
    takeover = Takeover(lease.directory, lease._path, stale_seconds=STALE_SECONDS)
    while True:
        with _locked(lease.directory):
            if takeover.is_free(_read(lease._path)):
                durable.replace(lease._path, json.dumps(lease._me).encode(), sync=False)
                return
        time.sleep(_POLL_SECONDS)


class Takeover:
    """Decides whether a lease that another process has written may be taken, call by call.

    Args:
        directory: The directory of the lease, for messages.
        file: The file of the lease, for messages.
        stale_seconds: How long a lease whose process is unknown must stay unchanged.
    """

    def __init__(self, directory: object, file: object, *, stale_seconds: float):
        self._directory, self._file, self._stale_seconds = directory, file, stale_seconds
        self._first_seen: dict[str, Any] | None = None
        self._start = time.monotonic()

    def is_free(self, owner: dict[str, Any] | None) -> bool:
        """Returns whether nobody holds the lease any more; if not, ask again a little later.

        Args:
            owner: The present content of the lease; None if there is none.

        Raises:
            errors.LeaseHeldError: If its process is alive.
        """
        if owner is None:
            return True
        state, who = state_of(owner), describe(owner)
        has_changed = self._first_seen is not None and owner != self._first_seen
        is_stale = not has_changed and time.monotonic() - self._start > self._stale_seconds
        if state == "dead" or (state == "unknown" and is_stale):
            _log.warning("%s: the lease of %s has expired", self._directory, who)
            return True
        if state == "alive" or has_changed:
            raise errors.LeaseHeldError(
                f"{self._directory}: {who} is writing here. Two trainers must not share a "
                "directory: stop that one or choose another directory. If it will never continue, "
                f"remove {self._file}."
            )
        if self._first_seen is None:
            text = "%s: waiting up to %.0f seconds, in case %s still writes here"
            _log.warning(text, self._directory, self._stale_seconds, who)
        self._first_seen = owner
        return False


def is_held_by(directory: pathlib.Path, group: str) -> bool:
    """Returns whether a process of the group at this address holds the lease, and is alive.

    If it is on another machine, this waits for the next renewal.
    """
    file = directory / NAME
    takeover = Takeover(directory, file, stale_seconds=3 * RENEW_SECONDS)
    try:
        while (owner := _read(file)) is not None and owner.get("group") == group:
            if takeover.is_free(owner):
                return False
            time.sleep(_POLL_SECONDS)
    except errors.LeaseHeldError:
        return True
    return False


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Serialises lease changes and commits of the processes on this machine."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise errors.LeaseHeldError(
                        f"{directory}: another process is changing this directory and does not "
                        "finish. Wait for it, or kill it if it is suspended."
                    ) from None
                time.sleep(0.002)
            except OSError:  # A file system without locks: the token must suffice.
                break
        yield
    finally:
        os.close(fd)


def identity(pid: int) -> dict[str, Any]:
    """Returns what identifies a process of this machine in a lease."""
    boot, pids = "", ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers on one machine number their processes separately.
        pids = os.readlink("/proc/self/ns/pid")
    host = socket.gethostname()
    return {"host": host, "boot": boot, "pids": pids, "pid": pid, "start": _process(pid)[0]}


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return files.read_json(path, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def state_of(owner: dict[str, Any]) -> Literal["alive", "dead", "unknown"]:
    """Returns the state of the process that holds a lease; unknown on another machine."""
    me = identity(os.getpid())
    pid, start = owner.get("pid"), owner.get("start")
    is_local = all(owner.get(key) == me[key] for key in ("host", "boot", "pids"))
    if not is_local or type(pid) is not int or not 0 < pid < 1 << 31:
        return "unknown"
    if (pid, start) == (me["pid"], me["start"]):
        return "dead"  # Held by nobody in this process: the file could not be removed.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass  # A process of another user, which may or may not be the holder.
    start_now, has_ended = _process(pid)
    if not start or not start_now:
        return "unknown"
    # The pid may belong to another process by now, or to a zombie.
    return "dead" if has_ended or start_now != start else "alive"


def _process(pid: int) -> tuple[str, bool]:
    """Returns a process's start time (empty if unknown) and whether it has ended."""
    try:
        # After the command's name, which may contain spaces: state, ..., start time.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", False
    return fields[19], fields[0] in "ZX"


def describe(owner: dict[str, Any]) -> str:
    """Names the owner of a lease."""
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}"
