"""The manifest of a committed step: every file with its size and checksum.

`tekoa.manifest` is one line of JSON and a second line with the CRC-32 of the first,
so that damage to the manifest itself is found too. It is the last file written
before the rename; a step of Tekoa's without it was never committed.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from tekoa.store import errors, files, names

VERSION = 1
Verify = Literal["none", "size", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a step consists of.

    Attributes:
        step: Completed optimizer steps.
        layout: How the arrays are stored: 'tekoa' or 't5x'.
        files: Size and CRC-32 by path relative to the step.
        facts: JSON values that tell one step from another, such as hashes.
    """

    step: int
    layout: str
    files: dict[str, tuple[int, int]]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def seal(
    directory: pathlib.Path,
    *,
    step: int,
    layout: str,
    facts: dict[str, Any],
    known: Mapping[str, tuple[int, int]] | None = None,
) -> Manifest:
    """Checksums and syncs everything in `directory`, then writes its manifest.

    Args:
        directory: A step that is completely written, not yet renamed.
        step: Its step.
        layout: How its arrays are stored.
        facts: See `Manifest.facts`.
        known: Size and CRC-32 of files that other processes wrote and synced.

    Returns:
        The manifest as written.
    """
    known = known or {}
    found = list(files.walk(directory))
    folders = [path for path, is_dir in found if is_dir]
    own = [path for path, is_dir in found if not is_dir and path not in known]
    listed = {**known, **files.checksums(directory, own, sync=True)}
    manifest = Manifest(step=step, layout=layout, files=listed, facts=facts)
    body = json.dumps({"version": VERSION, **dataclasses.asdict(manifest)}).encode()
    files.write_new(directory / names.MANIFEST, body + b"\n%08x\n" % zlib.crc32(body))
    for folder in folders:
        files.fsync(directory / folder)
    files.fsync(directory)
    return manifest


def read(directory: str | os.PathLike[str]) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        FileNotFoundError: If the step has none: other programs write none.
        errors.DamagedError: If it is cut, altered or names files outside the step.
    """
    path = pathlib.Path(directory) / names.MANIFEST
    body, _, tail = path.read_bytes().partition(b"\n")
    if tail != b"%08x\n" % zlib.crc32(body):
        raise errors.DamagedError(f"{path}: the manifest does not match its own checksum.")
    try:
        fields = json.loads(body)
        version = fields.pop("version")
        listed = {str(p): (int(n), int(crc)) for p, (n, crc) in fields.pop("files").items()}
        manifest = Manifest(files=listed, **fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise errors.DamagedError(f"{path}: the manifest is not readable: {error}.") from error
    if version != VERSION:
        raise errors.DamagedError(
            f"{path}: the manifest has version {version}, this Tekoa reads {VERSION}. "
            "Update Tekoa to read it."
        )
    for name in listed:
        if not names.is_safe_path(name):
            raise errors.UnsafeError(f"{path}: lists {name!r}, which is outside the step.")
    return manifest


def check(directory: str | os.PathLike[str], manifest: Manifest, verify: Verify) -> None:
    """Compares the files of a step with its manifest.

    Args:
        directory: The step.
        manifest: Its manifest.
        verify: 'none' does nothing, 'size' looks at presence and sizes, 'full' reads
            every byte.

    Raises:
        errors.DamagedError: At the first file that differs, naming it.
    """
    if verify not in ("none", "size", "full"):
        raise ValueError(f"verify must be 'none', 'size' or 'full', got {verify!r}.")
    if verify == "none":
        return
    directory = pathlib.Path(directory)
    for name, (size, _) in manifest.files.items():
        path = directory / name
        try:
            seen = os.stat(path, follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise errors.DamagedError(f"{path}: the file is missing.") from None
        if seen != size:
            raise errors.DamagedError(f"{path}: has {seen} bytes, the manifest says {size}.")
    if verify == "size":
        return
    for name, seen in files.checksums(directory, manifest.files).items():
        if seen != manifest.files[name]:
            raise errors.DamagedError(
                f"{directory / name}: the checksum does not match the manifest."
            )
