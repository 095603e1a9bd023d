"""Opens data files, with the same error messages for all formats.

A pattern that matches no file is reported earlier, by `data/patterns.py`.
"""

import gzip
import importlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tekoa.core import messages
from tekoa.data.readers.base import DataError


def read_bytes(path: str | Path) -> bytes:
    """Reads a complete file, decompressing it if its name ends in .gz.

    Raises:
        DataError: If it is missing, empty, or a truncated or corrupt .gz file.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if path.suffix == ".gz" and content:
            content = gzip.decompress(content)
    except EOFError:
        raise DataError(
            f"{path} is truncated: its gzip data ends after {path.stat().st_size} bytes, without "
            "an end marker. Download or copy it again."
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is not valid gzip data: {error}. Download or copy it again."
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not content:
        raise empty(path)
    return content


def check_readable(path: str | Path) -> int:
    """Returns the size of a file after checking that it is readable and not empty."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
    except OSError as error:
        raise unreadable(path, error) from None
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
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{what} needs {library!r}, which cannot be imported ({error}). "
            f"Install it with: pip install 'tekoa[{extra}]'."
        ) from None
