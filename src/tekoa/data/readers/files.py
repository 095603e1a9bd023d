"""Opens data files, with the same error messages for all formats.

A pattern that matches no file is reported earlier, by `data/patterns.py`.
"""

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from tekoa import _extras
from tekoa.core import files as core_files
from tekoa.core import messages
from tekoa.data.readers.base import DataError

_BLOCK = 2**24


def open_file(path: str | Path) -> IO[bytes]:
    """Opens a regular file, or a link to one, for reading.

    Raises:
        DataError: If it is missing, or anything else than a regular file.
    """
    path = core_files.local_path(path)
    try:
        return core_files.open_regular(path, follow_links=True)
    except OSError as error:
        raise unreadable(path, error) from None


@contextlib.contextmanager
def open_unpacked(path: str | Path) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressing it if its name ends in .gz.

    Raises:
        DataError: Also while reading, if it is missing, empty, or a truncated or corrupt .gz file.
    """
    path = core_files.local_path(path)
    with open_file(path) as file:
        size = check_readable(path)
        try:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
        except EOFError:
            raise DataError(
                f"{path} is truncated: its gzip data ends after {size} bytes, without an end "
                "marker. Download or copy it again."
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path} is not valid gzip data: {error}. Download or copy it again."
            ) from None
        except OSError as error:
            raise unreadable(path, error) from None


def read_at_most(file: IO[bytes], n_bytes: int) -> bytes:
    """Reads up to `n_bytes`, allocating only what the file really contains."""
    parts = []
    while n_bytes > 0 and (part := file.read(min(n_bytes, _BLOCK))):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def read_bytes(path: str | Path) -> bytes:
    """Reads a complete file, decompressing it if its name ends in .gz.

    Raises:
        DataError: If it is missing, empty, a truncated or corrupt .gz file, or larger than half
            of the machine's memory.
    """
    max_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with open_unpacked(path) as file:
        content = read_at_most(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise DataError(
            f"{path} has more than {max_bytes} bytes, half of this machine's memory. Unpack it if "
            "it is compressed, or split it into several files."
        )
    if not content:
        raise empty(path)
    return content


def check_readable(path: str | Path) -> int:
    """Returns the size of a file after checking that it is readable and not empty."""
    with open_file(path) as file:
        size = file.seek(0, 2)
    if size == 0:
        raise empty(path)
    return size


def names(paths: Sequence[str]) -> str:
    """Lists the first few file names, without their directories.

    >>> names(['data/a.txt', 'data/b.txt'])
    'a.txt, b.txt'
    """
    return messages.some_of([Path(path).name for path in paths], limit=4)


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Returns the error for a file that cannot be opened."""
    return DataError(f"Cannot read {path}: {error.strerror or error}.")


def empty(path: str | Path) -> DataError:
    """Returns the error for a file without content."""
    return DataError(f"{path} is empty (0 bytes). Remove it from the data pattern or replace it.")


def require(module: str, extra: str, what: str) -> ModuleType:
    """Imports an optional library, or raises an error that says how to install it.

    Args:
        module: Dotted name, such as 'pyarrow.csv'.
        extra: The extra of tekoa that installs it.
        what: What needs it, for the message.
    """
    try:
        return _extras.require(module, extra=extra, what=what)
    except ImportError as error:
        raise DataError(f"{error}.") from None
