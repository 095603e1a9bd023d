"""Opens data files: one way to read them whole, and one message when that fails."""

import gzip
import importlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tekoa.data.reader import DataError


def read_bytes(path: str | Path) -> bytes:
    """Reads a file whole, through gzip if its name ends in .gz.

    Raises:
        DataError: If it is missing, empty, or a .gz file that is cut off or damaged.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if path.suffix == ".gz" and content:
            content = gzip.decompress(content)
    except EOFError:
        raise DataError(
            f"{path} is cut off: its gzip data ends after {path.stat().st_size} bytes on disk, "
            "before the end mark. Fetch it again."
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not sound gzip data: {error}. Fetch it again.") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not content:
        raise DataError(f"{path} is empty.")
    return content


def check_readable(path: str | Path) -> int:
    """Gives the size of a file that is there, readable and not empty."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
    except OSError as error:
        raise unreadable(path, error) from None
    if size == 0:
        raise DataError(f"{path} is empty.")
    return size


def names(paths: Sequence[str]) -> str:
    """Names files in a few words, without their folders.

    >>> names(['data/a.txt', 'data/b.txt'])
    'a.txt, b.txt'
    """
    shown = ", ".join(Path(path).name for path in paths[:4])
    return shown if len(paths) <= 4 else f"{shown} and {len(paths) - 4} more"


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Makes the error for a file that cannot be opened."""
    return DataError(f"Cannot read {path}: {error.strerror or error}.")


def require(module: str, extra: str, what: str) -> ModuleType:
    """Imports an optional library, or says how to install it.

    Args:
        module: Dotted name, such as 'pyarrow.csv'.
        extra: Tekoa's extra that installs it.
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
