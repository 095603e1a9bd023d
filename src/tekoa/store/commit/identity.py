"""The identity of a commit: which bytes, written by which start of a program.

Step numbers repeat: a run that is rolled back commits the same numbers again, with other
values. Whatever belongs to one commit, such as a score, refers to it by its identity.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import uuid
from typing import Any

from tekoa.store import errors
from tekoa.store.commit import durable, manifest, paths, retention


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitId:
    """The identity of a committed step. Copies of a step have the same identity.

    Attributes:
        digest: SHA-256 of the step's manifest, in hex: the result of `sha256sum tekoa.manifest`.
            The manifest contains the checksum of every file. For a step that another program
            wrote without a manifest, it is the digest of the manifest that a copy would have.
        start: Identifies the start of the program that wrote the step; empty if unknown.
        parent: The digest of the commit from which that start resumed; empty if it did not
            resume, or if this is unknown.
    """

    digest: str
    start: str = ""
    parent: str = ""


def commit_id(path: str | os.PathLike[str]) -> CommitId:
    """Returns the identity of a committed step, without reading its arrays.

    Only a step that another program wrote without a manifest is read completely.

    Args:
        path: The directory of the step.

    Raises:
        FileNotFoundError: If the step does not exist.
        errors.DamagedError: If its manifest is damaged.
    """
    path = pathlib.Path(path)
    try:
        return of_manifest(manifest.read(path))
    except FileNotFoundError:
        files = [name for name, is_dir in durable.walk(path) if not is_dir]
        names = [name for name in files if name != retention.PINNED]
        data = manifest.encode(
            step=paths.parse_step(path.name) or 0,
            format="t5x",
            files=durable.checksums(path, names),
            facts={},
        )
        return CommitId(digest=hashlib.sha256(data).hexdigest())


def of_manifest(sealed: manifest.Manifest) -> CommitId:
    """Returns the identity of the step with this manifest."""
    start, parent = (sealed.facts.get(key, "") for key in ("start", "parent"))
    return CommitId(digest=sealed.digest, start=str(start), parent=str(parent))


def start_facts(parent: str) -> dict[str, Any]:
    """Returns the facts of a manifest that `commit_id` reads.

    Args:
        parent: See `CommitId.parent`.
    """
    return {"start": start_id(), **({"parent": parent} if parent else {})}


def chain_facts(directory: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns the facts of a manifest that name the step before: its number and its digest.

    So a step that was exchanged or removed later is noticed, without reading any array.
    """
    before = max((n for n in paths.list_steps(directory) if n < step), default=None)
    if before is None:
        return {}
    try:
        sealed = manifest.read(paths.step_dir(directory, before))
    except (OSError, errors.StoreError):
        return {}  # Not written by Tekoa, or damaged.
    return {"previous": {"step": before, "digest": sealed.digest}}


def start_id() -> str:
    """Returns a random identifier of this start of the program."""
    return _start_id(os.getpid())


@functools.cache
def _start_id(pid: int) -> str:
    # A forked child is a start of its own.
    del pid
    return uuid.uuid4().hex
