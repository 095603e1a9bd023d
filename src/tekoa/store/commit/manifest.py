"""The manifest of a committed step: every file with its size and checksum.

`tekoa.manifest` is one line of JSON, followed by a line with the CRC-32 of the first, so that
damage to the manifest itself is detected too. It is the last file written before the rename;
a step that Tekoa wrote and that has no manifest was never committed.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from tekoa.core import files as files_lib
from tekoa.store import errors
from tekoa.store.commit import durable, paths

VERSION = 1
_MAX_BYTES = 2**26
Verify = Literal["none", "size", "full"]

# In the file the format is called `layout`, and our own format is called 'tekoa'.
_NATIVE, _NATIVE_ON_DISK = "native", "tekoa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a step.

    Attributes:
        step: Completed optimizer steps.
        format: 'native' or 't5x'; steps written by later versions may have others.
        files: Size and CRC-32 by path relative to the step.
        facts: JSON values that identify the step, such as hashes.
        digest: SHA-256 of the manifest's bytes, in hex.
    """

    step: int
    format: str
    files: dict[str, tuple[int, int]]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    digest: str = ""


def seal(
    directory: pathlib.Path,
    *,
    step: int,
    format: str,
    facts: dict[str, Any],
    checksums: Mapping[str, tuple[int, int]] | None = None,
) -> Manifest:
    """Checksums and syncs everything in `directory`, then writes its manifest.

    A manifest that is already there, because the step was copied, is kept if it fits the files.

    Args:
        directory: A step that is completely written, not yet renamed.
        step: The step number.
        format: The format of the step.
        facts: See `Manifest.facts`.
        checksums: Size and CRC-32 of files that were already checksummed and synced.

    Returns:
        The manifest as written.

    Raises:
        errors.DamagedError: If the manifest of a copied step does not fit its files.
    """
    checksums = checksums or {}
    entries = list(durable.walk(directory))
    folders = [path for path, is_dir in entries if is_dir]
    names = [path for path, is_dir in entries if not is_dir and path != paths.MANIFEST]
    remaining = [path for path in names if path not in checksums]
    checksums = {**checksums, **durable.checksums(directory, remaining, sync=True)}
    files = {path: checksums[path] for path in names}
    if (directory / paths.MANIFEST).exists():
        sealed = read(directory)
        if sealed.files != files:
            raise errors.DamagedError(f"{directory}: the copied files do not match the manifest.")
        durable.fsync(directory / paths.MANIFEST)
    else:
        data = encode(step=step, format=format, files=files, facts=facts)
        durable.write_new(directory / paths.MANIFEST, data)
        sealed = parse(data, directory / paths.MANIFEST)
    for folder in folders:
        durable.fsync(directory / folder)
    durable.fsync(directory)
    return sealed


def encode(*, step: int, format: str, files: Mapping[str, Any], facts: dict[str, Any]) -> bytes:
    """Returns the bytes of a manifest."""
    layout = _NATIVE_ON_DISK if format == _NATIVE else format
    fields = {"step": step, "layout": layout, "files": files, "facts": facts}
    body = json.dumps({"version": VERSION, **fields}).encode()
    return body + b"\n%08x\n" % zlib.crc32(body)


def read(directory: str | os.PathLike[str]) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        FileNotFoundError: If the step has none; other programs write none.
        PermissionError: If it may not be read, which is no damage.
        errors.DamagedError: If it is truncated, altered or lists files outside the step.
        errors.NewerVersionError: If a later version of Tekoa wrote it.
    """
    path = pathlib.Path(directory) / paths.MANIFEST
    try:
        data = files_lib.read_bytes(path, max_bytes=_MAX_BYTES)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise errors.DamagedError(f"{path}: cannot be read: {error.strerror}.") from None
    return parse(data, path)


def parse(data: bytes, path: pathlib.Path) -> Manifest:
    """Returns the manifest with these bytes; `path` is for messages. Errors as for `read`."""
    body, _, tail = data.partition(b"\n")
    if tail != b"%08x\n" % zlib.crc32(body):
        raise errors.DamagedError(f"{path}: the manifest does not match its own checksum.")
    try:
        fields = json.loads(body)
        version = fields.pop("version")
        # Checked first: the fields of a later version are unknown.
        if type(version) is int and version > VERSION:
            raise errors.NewerVersionError(
                f"{path}: the step has format version {version}, this Tekoa reads {VERSION}. "
                "Update Tekoa to use it; nothing was changed."
            )
        if version != VERSION:
            raise ValueError(f"version {version!r}")
        files = {str(p): (int(n), int(crc)) for p, (n, crc) in fields.pop("files").items()}
        layout = fields.pop("layout")
        format = _NATIVE if layout == _NATIVE_ON_DISK else layout
        digest = hashlib.sha256(data).hexdigest()
        manifest = Manifest(files=files, format=format, digest=digest, **fields)
    except (
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as e:
        raise errors.DamagedError(f"{path}: the manifest is unreadable: {e}.") from e
    if not isinstance(manifest.facts, dict):
        raise errors.DamagedError(f"{path}: the manifest has the facts {manifest.facts!r}.")
    for name in files:
        if not paths.is_safe_path(name):
            raise errors.UnsafeError(f"{path}: lists {name!r}, which is outside the step.")
    return manifest


def check(directory: str | os.PathLike[str], manifest: Manifest, verify: Verify) -> None:
    """Compares the files of a step with its manifest.

    Args:
        directory: The step.
        manifest: Its manifest.
        verify: 'none' does nothing, 'size' compares file sizes, 'full' reads every byte.

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
            n_bytes = files_lib.size(path)
        except (FileNotFoundError, NotADirectoryError):
            raise errors.DamagedError(f"{path}: the file is missing.") from None
        except PermissionError:
            raise  # This is no damage.
        except OSError as error:
            raise errors.DamagedError(f"{path}: {error.strerror}.") from None
        if n_bytes != size:
            raise errors.DamagedError(f"{path}: has {n_bytes} bytes, the manifest says {size}.")
    if verify == "size":
        return
    for name, size_and_crc in durable.checksums(directory, manifest.files).items():
        if size_and_crc != manifest.files[name]:
            raise errors.DamagedError(
                f"{directory / name}: the checksum does not match the manifest."
            )
