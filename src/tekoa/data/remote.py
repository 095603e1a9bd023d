"""Data files in object stores (`s3://`, `gs://`), copied once to a local cache.

Readers need random access, checksums of sizes and cheap opening, which an object store does not
offer. So a file is downloaded completely before it is read. The copy is used again as long as the
store reports the same version of the object.
"""

import hashlib
import os
import pathlib
import tempfile
from typing import Any

from tekoa.core import messages
from tekoa.data.readers import files
from tekoa.data.readers.base import DataError

SCHEMES = ("s3", "gs", "memory")
# What stores call the version of an object; the size is compared in any case.
_VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
_BLOCK = 2**22


def fetch(pattern: str) -> list[str]:
    """Copies the objects that a URL or a glob matches to the cache; returns the copies.

    Args:
        pattern: `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or `memory://PATH`, which may be a glob.

    Raises:
        DataError: If it matches nothing, or the store cannot be read.
    """
    fsspec = files.require("fsspec", "cloud", f"Reading {pattern}")
    messages.quiet_log("gcsfs")
    try:
        store, path = fsspec.core.url_to_fs(pattern)
        # Listings of earlier calls may be out of date.
        store.invalidate_cache()
        names = sorted(store.glob(path)) if any(c in path for c in "*?[") else [path]
        infos = [store.info(name) for name in names if store.isfile(name)]
    except ImportError as error:
        raise DataError(
            f"Reading {pattern} needs a package that is missing ({error}). Install it with: pip "
            "install 'tekoa[cloud]'."
        ) from None
    except Exception as error:  # Each store has errors of its own.
        raise _unreadable(pattern, error) from None
    if not infos:
        raise DataError(f"The data pattern {pattern!r} matches no file.")
    return [_copy(store, info, pattern) for info in infos]


def cache_dir() -> pathlib.Path:
    """Returns the directory of the copies, in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tekoa" / "data"


def _copy(store: Any, info: dict[str, Any], pattern: str) -> str:
    """Downloads an object unless this version of it is in the cache."""
    name, size = str(info["name"]), info["size"]
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    # `memory://` belongs to a process: its objects have no version beyond it.
    protocol = store.protocol if isinstance(store.protocol, str) else store.protocol[0]
    key = f"{protocol} {name} {size} {version}"
    folder = cache_dir() / hashlib.sha256(key.encode()).hexdigest()[:24]
    # The name is kept: its ending selects the reader, and it is part of the fingerprint.
    local = folder / pathlib.PurePosixPath(name).name
    if local.is_file() and local.stat().st_size == size:
        return str(local)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy:
            try:
                with store.open(name, "rb") as remote:
                    while block := remote.read(_BLOCK):
                        copy.write(block)
                copy.flush()
                if (n_bytes := copy.tell()) != size:
                    raise OSError(f"it has {size} bytes, but {n_bytes} were read")
                # Processes that download the same object at once replace it by the same bytes.
                os.replace(copy.name, local)
            except BaseException:
                os.unlink(copy.name)
                raise
    except Exception as error:  # Each store has errors of its own.
        raise _unreadable(f"{pattern} ({name})", error) from None
    return str(local)


def _unreadable(pattern: str, error: Exception) -> DataError:
    text = str(error) or type(error).__name__
    return DataError(f"Cannot read {pattern}: {text}. Check the name, the network and the rights.")
