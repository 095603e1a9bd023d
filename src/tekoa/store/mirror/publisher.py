"""Publishes a working copy: uploads what is new, puts the head, deletes what it replaced.

The directory in the store changes only by the put of its head, so it is always that of one moment:
a killed writer leaves objects that no head names, which the next writer deletes. Uploads run in
the background and never hold up training. If the store does not answer, that is reported once and
tried again; what was saved meanwhile is published together. `close` fails if the last state is not
in the store.
"""

import contextlib
import json
import logging
import os
import pathlib
import threading
import time
import uuid

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable, fault_points, paths
from tekoa.store.mirror import fetch, registry, work_dirs
from tekoa.store.mirror import head as head_lib
from tekoa.store.mirror import snapshot as snapshot_lib
from tekoa.store.mirror.head import Files, Head
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.remote_lease import RemoteLease
from tekoa.store.mirror.versions import ABSENT, ConflictError

RETRY_SECONDS = 2.0
_MAX_RETRY_SECONDS = 30.0
_STATE = "published.json"

_log = logging.getLogger("tekoa.store")


class Publisher:
    """The only writer of a run directory in an object store.

    Args:
        url: The directory; it need not exist.

    Attributes:
        directory: The working copy, which has the contents of the directory.

    Raises:
        errors.LeaseHeldError: If another process is writing to the directory.
        errors.DamagedError: If the head is damaged.
        errors.StoreError: If the store cannot be used.
    """

    def __init__(self, url: str | os.PathLike[str]):
        self._objects = Objects(url)
        self.url = self._objects.url
        self.directory = work_dirs.of_writer(self.url)
        self._state = self.directory.parent / _STATE
        if registry.is_observed(self.directory):
            raise errors.LeaseHeldError(f"{self.url}: this process is already writing here.")
        self._lease = RemoteLease(self._objects)
        try:
            self._head, self._version = self._raise_fence()
            self._stored: Files = dict(self._head.files)
            # Objects that a head before the present one names, or none yet.
            self._written: set[str] = set()
            self._is_swept = False
            self._match_head()
        except BaseException:
            self._lease.release()
            raise
        self._changed = threading.Condition()
        self._n_changes = self._n_published = 0
        self._is_closing = self._has_ended = False
        self._problem: Exception | None = None
        registry.add(self.directory, self)
        threading.Thread(target=self._run, name="tekoa-publish", daemon=True).start()

    def check(self) -> None:
        """Raises `errors.FencedError` if another writer took over the directory."""
        self._lease.check()
        if isinstance(self._problem, errors.FencedError):
            raise self._problem

    def notify(self) -> None:
        """Starts a publication, or one more if one is running."""
        with self._changed:
            self._n_changes += 1
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all changes so far are published; returns whether they are."""
        with self._changed:
            n = self._n_changes
            self._changed.wait_for(
                lambda: self._n_published >= n or self._has_ended, timeout_seconds
            )
            return self._n_published >= n

    def close(self, grace_seconds: float) -> None:
        """Publishes the last state and lets others write.

        Args:
            grace_seconds: How long to wait for it.

        Raises:
            errors.FencedError: If another writer took over the directory.
            errors.SaveFailedError: If the last state could not be published in time.
        """
        with self._changed:
            self._is_closing = True
        self.notify()
        is_published = self.wait(grace_seconds)
        registry.discard(self.directory)
        self.check()
        if not is_published:
            reason = f"It takes longer than {grace_seconds:g} seconds."
            if self._problem is not None:
                reason = _text(self._problem)
            raise errors.SaveFailedError(
                f"{self.url}: {self._unpublished()} not published. {reason} The working copy is "
                f"{self.directory}. Run the same command again on this machine to publish it."
            )
        self._remove_damaged()
        self._lease.release()

    def _remove_damaged(self) -> None:
        """Removes damaged files from the working copy: by the next start they may be repaired."""
        stamps = snapshot_lib.stamps_of(self.directory, self._damaged)
        for path, stamp in stamps.items():
            if stamp == self._damaged[path]:
                (self.directory / path).unlink()

    def _unpublished(self) -> str:
        published = {head_lib.step_of(path) for path in self._head.files}
        steps = [n for n in paths.list_steps(self.directory) if f"checkpoint_{n}" not in published]
        if not steps:
            return "the last files of the run are"
        return f"step {steps[0]} is" if len(steps) == 1 else f"steps {steps} are"

    def fetch_step(self, path: pathlib.Path) -> None:
        """Downloads what is missing of a step, or of the newest step of a directory."""
        name = path.relative_to(self.directory).as_posix()
        is_step = head_lib.step_of(f"{name}/x") == name
        get = fetch.fetch_step if is_step else fetch.fetch_newest
        fetch.report(get(self._objects, self._head, self.directory, name))

    def _raise_fence(self) -> tuple[Head, str]:
        """Makes this process the writer: the puts of earlier ones fail from now on."""
        while True:
            head, version = fetch.read_head(self._objects) or (Head(id=uuid.uuid4().hex), ABSENT)
            head = Head(id=head.id, fence=head.fence + 1, files=head.files)
            data = head_lib.encode(head)
            with contextlib.suppress(ConflictError):
                return head, self._objects.put(head_lib.NAME, data, replaces=version)

    def _match_head(self) -> None:
        """Makes the working copy what the head says, unless it is a later state of that."""
        names = fetch.small_files(self._head)
        if self._head.id in self._read_ids():
            names = [path for path in names if not (self.directory / path).exists()]
        else:
            self._state.unlink(missing_ok=True)
            if not self._head.files:
                self._set_aside()
            self._remove_others()
        damage = fetch.fetch_files(self._objects, self._head, self.directory, names)
        fetch.report(damage.values())
        # They stay what they are in the store, unless they are written again.
        self._damaged = snapshot_lib.stamps_of(self.directory, damage)
        self._stamps = dict(self._damaged)
        self.directory.mkdir(parents=True, exist_ok=True)
        steps = {f"checkpoint_{n}" for n in paths.list_steps(self.directory)}
        stored = [path for path in self._head.files if head_lib.step_of(path) in steps]
        if not all((self.directory / path).exists() for path in stored):
            fetch.report(fetch.fetch_newest(self._objects, self._head, self.directory))
        self._ids = [self._head.id]
        self._write_ids()

    def _set_aside(self) -> None:
        """Keeps the checkpoints of a working copy of which nothing is in the store any more."""
        steps = paths.list_steps(self.directory)
        if steps:
            target = self.directory.with_name(f"set_aside-{uuid.uuid4().hex[:8]}")
            self.directory.rename(target)
            _log.warning(
                "%s has no checkpoint, but there are checkpoints up to step %d in an earlier "
                "working copy on this machine. They are not used, and were moved to %s.",
                self.url,
                steps[-1],
                target,
            )

    def _remove_others(self) -> None:
        """Removes the files of an earlier working copy that are not in the head."""
        removed = set()
        for path, is_dir in durable.walk(self.directory) if self.directory.exists() else ():
            if not is_dir and path not in self._head.files:
                (self.directory / path).unlink()
                removed.add(head_lib.step_of(path))
            elif is_dir:
                with contextlib.suppress(OSError):  # Not empty.
                    (self.directory / path).rmdir()
        steps = sorted(step for step in removed if step and not (self.directory / step).exists())
        if steps:
            _log.warning(
                "%s: %s of an earlier working copy on this machine are not continued and were "
                "removed, because the directory has another history by now.",
                self.url,
                ", ".join(steps),
            )

    def _read_ids(self) -> list[str]:
        try:
            ids = files.read_json(self._state, max_bytes=2**16).get("ids")
        except (OSError, ValueError):
            return []
        return ids if isinstance(ids, list) else []

    def _write_ids(self) -> None:
        """Records the heads that may be in the store and are no later than the working copy."""
        self._state.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(self._state, json.dumps({"url": self.url, "ids": self._ids}).encode())

    def _run(self) -> None:
        delay = RETRY_SECONDS
        while not self._has_ended:
            with self._changed:
                self._changed.wait_for(lambda: self._n_changes > self._n_published)
                n = self._n_changes
            error = self._attempt()
            with self._changed:
                if error is None:
                    self._n_published, delay = n, RETRY_SECONDS
                    self._has_ended = self._is_closing and self._n_changes == n
                else:
                    self._has_ended = isinstance(error, errors.FencedError)
                self._changed.notify_all()
                if error is not None and not self._has_ended:
                    self._changed.wait(1.0 if self._is_closing else delay)
                    delay = min(2 * delay, _MAX_RETRY_SECONDS)

    def _attempt(self) -> Exception | None:
        """Publishes once; returns what went wrong, which is reported when it begins and ends."""
        try:
            self._publish()
        except Exception as error:
            if isinstance(error, errors.FencedError):
                _log.error("%s", error)
            elif self._problem is None:
                _log.warning(
                    "%s: publishing failed: %s Training continues; it is tried again.",
                    self.url,
                    _text(error),
                )
            self._problem = error
        else:
            if self._problem is not None:
                _log.warning("%s: publishing works again.", self.url)
            self._problem = None
        return self._problem

    def _publish(self) -> None:
        """Publishes the present state of the working copy, if it has changed."""
        self._lease.check()
        started = time.monotonic()
        id = uuid.uuid4().hex
        prefix = f"{self._head.fence}-{id[:12]}"
        with snapshot_lib.snapshot(
            self.directory, self._stored, self._stamps, prefix=prefix, own=self.directory.parent
        ) as snapshot:
            # With several ids a put was not answered, so the head in the store is uncertain.
            if snapshot.files == self._head.files and len(self._ids) == 1:
                self._sweep()
                return
            self._check_not_lost(snapshot.files)
            fault_points.reach("before_upload")
            self._written |= snapshot.uploads.keys()
            self._objects.upload(snapshot.uploads, lambda: fault_points.reach("mid_upload"))
        # A retry need not upload it again.
        self._stored, self._stamps = {**self._stored, **snapshot.files}, snapshot.stamps
        fault_points.reach("before_head")
        self._put(Head(id=id, fence=self._head.fence, files=snapshot.files))
        fault_points.reach("after_head")
        _log.info("published %s in %.3f s", self.url, time.monotonic() - started)
        self._stored = dict(snapshot.files)
        self._sweep()

    def _check_not_lost(self, new: Files) -> None:
        """Raises if all steps have disappeared: then somebody cleaned the cache."""
        if any(map(head_lib.step_of, self._head.files)) and not any(map(head_lib.step_of, new)):
            raise errors.DamagedError(
                f"{self.directory} has lost its checkpoints. {self.url} was left as it is; run "
                "the same command again to resume from there."
            )

    def _put(self, head: Head) -> None:
        """Replaces the head."""
        self._ids.append(head.id)
        self._write_ids()
        while True:
            try:
                data = head_lib.encode(head)
                self._version = self._objects.put(head_lib.NAME, data, replaces=self._version)
                break
            except ConflictError:
                stored, self._version = fetch.read_head(self._objects) or (Head(), ABSENT)
                # No other writer has our fence: then it is our own put, whose answer was lost.
                if stored.fence != head.fence:
                    raise errors.FencedError(
                        f"{self.url}: another writer took over this directory, so nothing was "
                        "published. Stop this process."
                    ) from None
        self._written |= self._head.objects
        self._head, self._ids = head, [head.id]
        self._write_ids()

    def _sweep(self) -> None:
        """Deletes the objects that no head names any more."""
        try:
            if not self._is_swept:
                # What killed writers left. Objects of a later writer, which may have replaced
                # this one without its knowledge, are not ours to delete.
                names = self._objects.names_in(head_lib.FOLDER)
                self._written |= {name for name in names if _fence(name) < self._head.fence}
                self._is_swept = True
            unused = self._written - self._head.objects
            self._objects.delete(sorted(unused), lambda: fault_points.reach("mid_remote_gc"))
            self._written -= unused
        except errors.StoreError as error:
            # The state is published: too many objects are better than a failure.
            _log.warning("could not delete objects that are not used any more: %s", error)


def _fence(name: str) -> int:
    """Returns the fence of the writer of an object, from its name `files/FENCE-ID/...`."""
    number = name.split("/")[1].partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else -1


def _text(error: Exception) -> str:
    is_own = isinstance(error, errors.StoreError)
    return str(error) if is_own else f"{type(error).__name__}: {error}."
