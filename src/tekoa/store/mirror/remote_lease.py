"""One writer per run directory of an object store: the lease object and its renewal.

`tekoa.writer` names its owner and counts its renewals, as the lease of a local directory does; see
`commit/lease.py` for the rules. It is changed by conditional puts only. It serves to refuse a
second writer at once and to notice a dead one; what keeps a replaced writer from publishing is the
fence in the head.
"""

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from typing import Any

from tekoa.store import errors
from tekoa.store.commit import lease
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.versions import ABSENT, ConflictError

NAME = "tekoa.writer"
RENEW_SECONDS = 5.0
STALE_SECONDS = 30.0
_POLL_SECONDS = 0.5

_log = logging.getLogger("tekoa.store")


class RemoteLease:
    """The right to write to a run directory of an object store, renewed by a thread.

    Args:
        objects: The directory.

    Raises:
        errors.LeaseHeldError: If another living process holds it; within `STALE_SECONDS`.
        errors.StoreError: If the store cannot be reached, or has no conditional puts.
    """

    def __init__(self, objects: Objects):
        self._objects = objects
        self._me = {**lease.identity(os.getpid()), "token": uuid.uuid4().hex, "count": 0}
        self._version = self._take()
        self._check_conditions()
        self._lock = threading.Lock()
        self._loss = ""
        self._released = threading.Event()
        threading.Thread(target=self._renew_often, name="tekoa-remote-lease", daemon=True).start()

    def check(self) -> None:
        """Raises `errors.FencedError` if another writer took the lease."""
        if self._loss:
            raise errors.FencedError(
                f"{self._objects.url}: process {os.getpid()} lost its lease to {self._loss}; "
                "nothing was published since. Stop this process, because another one may be "
                "writing."
            )

    def release(self) -> None:
        """Lets another process write; if the store does not answer, the lease becomes stale."""
        self._released.set()
        with self._lock:
            if not self._loss:
                self._me["is_released"] = True
                try:
                    self._put()
                except errors.StoreError as error:
                    _log.warning("could not release the lease: %s", error)

    def _take(self) -> str:
        names = (self._objects.url, self._objects.at(NAME))
        takeover = lease.Takeover(*names, stale_seconds=STALE_SECONDS)
        while True:
            data, version = self._objects.read(NAME) or (b"", ABSENT)
            owner = _parse(data)
            is_free = version == ABSENT or owner.get("is_released")
            if takeover.is_free(None if is_free else owner):
                try:
                    return self._objects.put(NAME, self._encode(), replaces=version)
                except ConflictError:  # Another process was faster.
                    takeover = lease.Takeover(*names, stale_seconds=STALE_SECONDS)
            else:
                time.sleep(_POLL_SECONDS)

    def _check_conditions(self) -> None:
        """Raises if the store ignores the condition of a put."""
        try:
            self._objects.put(NAME, self._encode(), replaces=ABSENT)
        except ConflictError:
            return
        raise errors.StoreError(
            f"{self._objects.url}: this store ignores the conditions of conditional writes, so "
            "it cannot keep a second writer out. Use a store that has them, "
            "or a local directory."
        )

    def _renew_often(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with self._lock:
                if self._released.is_set() or self._loss:
                    return
                self._me["count"] += 1
                # The publisher reports it. Whoever takes over meanwhile fences this writer.
                with contextlib.suppress(errors.UnreachableError):
                    self._put()

    def _put(self) -> None:
        """Writes the lease, or notes to whom it was lost."""
        try:
            self._version = self._objects.put(NAME, self._encode(), replaces=self._version)
            return
        except ConflictError:
            data, version = self._objects.read(NAME) or (b"", ABSENT)
        owner = _parse(data)
        if owner.get("token") == self._me["token"]:
            self._version = version  # The answer to an earlier put was lost.
            return
        self._loss = lease.describe(owner) if owner else "nobody (the object is gone)"
        _log.error("%s: lost the lease to %s", self._objects.url, self._loss)

    def _encode(self) -> bytes:
        return json.dumps(self._me).encode()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}
