"""The CSV file of a run: `metrics.csv`, one line per step and one column per metric."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tekoa.core import files
from tekoa.extensions.trackers.service import RunFacts
from tekoa.loop.media import Media
from tekoa.store.commit import durable

FILE_NAME = "metrics.csv"


class CSVService:
    """Writes the metrics of a run to a CSV file.

    Args:
        path: The file; its directory is created if necessary.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = files.local_path(path)
        self._rows: list[Mapping[str, Any]] = []
        self._columns: dict[str, None] = {}
        self._must_rewrite = True  # The file may be that of an earlier start.

    def open(self, run_id: str | None, facts: RunFacts) -> tuple[str, int]:
        """Starts over: the file is written again from the lines of the run."""
        del run_id, facts
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rows, self._columns, self._must_rewrite = [], {}, True
        return "", -1

    def log(self, row: Mapping[str, Any], media: Mapping[str, Media]) -> None:
        """Appends a line, or writes the file again if there is a new column."""
        del media
        columns = self._columns | dict.fromkeys(row)
        must_rewrite = self._must_rewrite or len(columns) > len(self._columns)
        # An attempt that fails may leave a part of a line.
        self._must_rewrite = True
        if must_rewrite:
            durable.replace(self._path, _encode([*self._rows, row], columns, header=True))
        else:
            with self._path.open("ab") as file:
                file.write(_encode([row], columns, header=False))
        self._rows.append(row)
        self._columns, self._must_rewrite = columns, False

    def close(self) -> None:
        """Does nothing: every line is written when it is logged."""


def _encode(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, None], *, header: bool
) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
