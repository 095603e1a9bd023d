"""A fingerprint of the files that a pattern names, to notice later that they have changed."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tekoa.data import mixing, patterns, remote
from tekoa.data.readers.base import DataError

# Files are read completely up to this size in total, larger ones in evenly spaced pieces.
_N_PIECES, _PIECE_BYTES = 256, 2**16
_IN_SCHEME = re.compile(r"(?:idx|images|npz)://(.*?)(?:/\w+=[^/]*)*")


def fingerprint(pattern: patterns.Pattern | None) -> str | None:
    """Describes the files that a pattern names, by their number, size and a digest.

    The digest covers the names and sizes of all files and up to 16 MB of their content. It does
    not notice a change within larger files that lies between the pieces that were read.

    Returns:
        None if the pattern names no local files.

    >>> fingerprint('digits://split=train')
    """
    text = str(pattern)
    if mixing.is_mixture(text) or any(f"{scheme}://" in text for scheme in remote.SCHEMES):
        return None
    try:
        files = [file for name in patterns.filenames(pattern or []) for file in _files(name)]
        sizes = [file.stat().st_size for file in files]
        return _describe(files, sizes) if files else None
    except (DataError, OSError):  # A model file may use its own patterns.
        return None


def _describe(files: Sequence[Path], sizes: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.name} {size}\n".encode())
    for piece in _pieces(files, sizes):
        digest.update(piece)
    kind = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{kind} of {sum(sizes)} bytes, digest {digest.hexdigest()[:12]}"


def _files(name: str) -> list[Path]:
    in_scheme = _IN_SCHEME.fullmatch(name)
    path = Path(in_scheme[1] if in_scheme else name)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path] if path.is_file() else []


def _pieces(files: Sequence[Path], sizes: Sequence[int]) -> Iterator[bytes]:
    """Yields the content of all files, or evenly spaced pieces of it."""
    distance = sum(sizes) // _N_PIECES
    if distance <= _PIECE_BYTES:
        yield from (path.read_bytes() for path in files)
        return
    offset = 0  # Where the next piece begins, counted from the start of the current file.
    for path, size in zip(files, sizes, strict=True):
        if offset < size:
            with path.open("rb") as file:
                for start in range(offset, size, distance):
                    file.seek(start)
                    yield file.read(_PIECE_BYTES)
                    offset = start + distance
        offset -= size
