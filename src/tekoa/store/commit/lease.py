"""One writer per directory: the lease file, its renewal and its fence.

`writer.lease` names its owner (host, process, boot, token) and counts its renewals. A lease is
taken over only if its process is dead on this machine, or if its count has not changed for
`STALE_SECONDS` of our own clock; the clocks of two hosts are never compared. All changes to
the directory happen inside `Lease.fence()`, which checks again that the lease is still ours:
a writer that was suspended and replaced cannot commit or delete anything. One process may
hold the lease of a directory several times.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import logging
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable

NAME = "writer.lease"
RENEW_SECONDS = 2.0
STALE_SECONDS = 20.0

_log = logging.getLogger("tekoa.store")
_register_once = functools.cache(atexit.register)
_held: dict[pathlib.Path, "Lease"] = {}
_held_lock = threading.RLock()


class Lease:
    """The right to write in a directory; created by `acquire`.

    Attributes:
        directory: The directory, resolved.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._path = directory / NAME
        self._me = {**_identity(os.getpid()), "token": uuid.uuid4().hex, "count": 0}
        self._n_holders = 1
        self._stop = threading.Event()

    @contextlib.contextmanager
    def fence(self) -> Iterator[None]:
        """Guards a change to the directory: the body runs only if the lease is still held.

        Raises:
            errors.FencedError: If the lease was lost.
        """
        with _locked(self.directory):
            owner = _read(self._path)
            if owner is None or owner.get("token") != self._me["token"]:
                raise errors.FencedError(
                    f"{self.directory}: process {os.getpid()} lost its lease to "
                    f"{_who(owner) if owner else 'nobody (the file is gone)'}; nothing was "
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
            self._stop.set()
        with contextlib.suppress(errors.StoreError, OSError), self.fence():
            self._path.unlink()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            try:
                with self.fence():
                    self._me["count"] += 1
                    durable.replace(self._path, json.dumps(self._me).encode())
            except errors.FencedError as error:
                if not self._stop.is_set():
                    _log.error("%s", error)
                return
            except (errors.LeaseHeldError, OSError):
                continue  # A full disk or a slow process must not end the renewal.


def acquire(directory: str | os.PathLike[str]) -> tuple[Lease, bool]:
    """Acquires the lease of a directory, creating the directory if needed.

    Args:
        directory: The directory to write in.

    Returns:
        The lease, and whether it is new to this process.

    Raises:
        errors.LeaseHeldError: If another living process holds it, within 5 seconds.
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
                return lease, False
            lease = Lease(path)
            _take(lease)
            _held[path] = lease
            _register_once(_release_all)
    except OSError as error:
        raise errors.StoreError(
            f"Cannot write to {path}, so checkpoints could not be saved: {error}. Choose a "
            "directory that this user may write to."
        ) from error
    threading.Thread(target=lease._renew, name="tekoa-lease", daemon=True).start()
    return lease, True


@contextlib.contextmanager
def held(directory: str | os.PathLike[str]) -> Iterator[Lease]:
    """Holds the lease of a directory during a `with` block; see `acquire`."""
    lease, _ = acquire(directory)
    try:
        yield lease
    finally:
        lease.release()


def _release_all() -> None:
    for lease in list(_held.values()):
        lease._n_holders = 1
        lease.release()


def break_lease(directory: str | os.PathLike[str]) -> bool:
    """Removes the lease of a directory, whoever holds it; for people, not for programs.

    Returns:
        Whether there was one. Its holder, if alive, can no longer commit.
    """
    path = files.local_path(directory).resolve()
    with _locked(path):
        try:
            (path / NAME).unlink()
        except FileNotFoundError:
            return False
    return True


def _take(lease: Lease) -> None:
    first_seen: dict[str, Any] | None = None
    start = time.monotonic()
    while True:
        with _locked(lease.directory):
            owner = _read(lease._path)
            waited = time.monotonic() - start
            if owner is None or _is_dead(owner) or (owner == first_seen and waited > STALE_SECONDS):
                if owner is not None:
                    _log.warning("%s: took over the lease of %s", lease.directory, _who(owner))
                durable.replace(lease._path, json.dumps(lease._me).encode())
                return
        if _is_local(owner) or (first_seen is not None and owner != first_seen):
            raise errors.LeaseHeldError(
                f"{lease.directory}: {_who(owner)} is writing here. Two trainers must not share "
                "a directory: stop that one or choose another directory. If it will never "
                f"continue, remove {lease._path}."
            )
        first_seen = owner
        time.sleep(0.2)


@contextlib.contextmanager
def _locked(directory: pathlib.Path, timeout_seconds: float = 4.0) -> Iterator[None]:
    """Serialises lease changes and commits of the processes on this machine."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        deadline = time.monotonic() + timeout_seconds
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


def _identity(pid: int) -> dict[str, Any]:
    boot, pids = "", ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers on one machine number their processes separately.
        pids = os.readlink("/proc/self/ns/pid")
    host = socket.gethostname()
    return {"host": host, "boot": boot, "pids": pids, "pid": pid, "start": _process(pid)[0]}


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        owner = None
    return owner if isinstance(owner, dict) else {}


def _is_local(owner: dict[str, Any]) -> bool:
    me = _identity(os.getpid())
    return all(owner.get(key) == me[key] for key in ("host", "boot", "pids"))


def _is_dead(owner: dict[str, Any]) -> bool:
    if not _is_local(owner):
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # The pid may belong to another process by now, or to a zombie.
    return _process(owner["pid"]) != (owner["start"], False) and bool(owner["start"])


def _process(pid: int) -> tuple[str, bool]:
    """Returns a process's start time (empty if unknown) and whether it has ended."""
    try:
        # After the command's name, which may contain spaces: state, ..., start time.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", False
    return fields[19], fields[0] in "ZX"


def _who(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}"
