"""Reads the JSON lines of a run: `metrics.jsonl` and `texts.jsonl`. Imports no JAX."""

import json
import os
import pathlib
from typing import Any

from tekoa.core import files
from tekoa.store import errors

TEXTS_NAME = "texts.jsonl"
_MAX_LINE_BYTES = 2**22
_ADVICE = "Move it away to continue without the earlier metrics."


def read_texts(directory: pathlib.Path) -> dict[int, dict[str, str]]:
    """Returns the texts of a run by step and name; raises as `read_rows`."""
    rows = read_rows(directory / TEXTS_NAME)
    return {row["step"]: {k: x for k, x in row.items() if isinstance(x, str)} for row in rows}


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of a file; the last one is left out if a kill cut it off.

    Raises:
        errors.DamagedError: If it is not a file, or if another line is not such an object.
    """
    rows = []
    try:
        with files.open_regular(path, follow_links=True) as file:
            # A line of any length would fill the memory.
            while line := file.readline(_MAX_LINE_BYTES):
                row = _parse(line)
                if row is not None:
                    rows.append(row)
                elif file.read(1):
                    start = line[:60].decode(errors="replace").rstrip()
                    raise errors.DamagedError(
                        f"{path}, line {len(rows) + 1}, is not a JSON object with a 'step': "
                        f"{start!r}. {_ADVICE}"
                    )
    except FileNotFoundError:
        pass
    except PermissionError:
        raise  # This is no damage.
    except OSError as error:
        raise errors.DamagedError(f"{path} cannot be read: {error.strerror}. {_ADVICE}") from None
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
