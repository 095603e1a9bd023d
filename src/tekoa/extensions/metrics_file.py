"""MetricsFile: writes the metrics of every checkpoint as JSON lines, and its texts beside them.

A line is one object: `{"step": 100, "seconds": 1.5, "train/loss": 0.3, ...}`; of texts, `{"step":
100, "sample": "Once upon a time"}`. Each step is there once, also after kills and resumes: when
training resumes from step n, lines after n are dropped, by the first checkpoint at the latest.
NaN and infinity are null, as JSON has no such numbers.

Lines are written in the background; see `outbox.py`. A full disk does not stop training: lines are
written once there is space.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from tekoa import hosts
from tekoa.extensions import outbox
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.loop.media import Text
from tekoa.store.commit import durable
from tekoa.store.read.json_lines import TEXTS_NAME, read_rows

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends the metrics of each checkpoint to a file; a stage for `serial`.

    Place it before the checkpoint writer: every step that was committed then has its line. Texts
    of checkpoints, such as samples, go to `texts.jsonl` beside the file, if there are any.

    Args:
        path: The file; its directory is created if necessary.
    """

    def __init__(self, path: str | os.PathLike[str]):
        path = pathlib.Path(path)
        self._metrics = _RowFile(path, row_of)
        self._texts = _RowFile(path.with_name(TEXTS_NAME), _texts_of)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All lines of the file so far, those of earlier starts included."""
        return self._metrics.rows

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the lines of one checkpoint, in process 0 only."""
        self._metrics(checkpoint)
        self._texts(checkpoint)
        return checkpoint

    def discard_after(self, step: int) -> None:
        """Drops the lines of later steps: training has returned to this one."""
        self._metrics.discard_after(step)
        self._texts.discard_after(step)

    def close(self) -> None:
        """Writes the remaining lines and closes the files."""
        self._metrics.close()
        self._texts.close()


class _RowFile:
    """Appends one row per checkpoint to a file, in process 0 only.

    Args:
        path: The file; its directory is created if necessary.
        row_of: Returns the row of a checkpoint, or None if it has none.

    Attributes:
        rows: All rows so far, those of earlier starts included.
    """

    def __init__(
        self, path: str | os.PathLike[str], row_of: Callable[[Checkpoint], dict[str, Any] | None]
    ):
        self._path, self._row_of = pathlib.Path(path), row_of
        self._is_writer = hosts.current().is_writer
        self._outbox: outbox.Outbox | None = None
        self._step: int | None = None
        self.rows: list[dict[str, Any]] = read_rows(self._path)

    def __call__(self, checkpoint: Checkpoint) -> None:
        # At the start, and when a loop in this process returns to an earlier step.
        if self._step is None or checkpoint.step <= self._step:
            self.discard_after(checkpoint.step - max(1, checkpoint.n_completed_steps))
        self._step = checkpoint.step
        row = self._row_of(checkpoint)
        if row is not None:
            # The first write replaces the file, of which a kill may have cut off the end.
            before = [_Contents(self.rows)] if self._outbox is None else []
            self.rows.append(row)
            self._put([*before, row])

    def discard_after(self, step: int) -> None:
        rows = [row for row in self.rows if row["step"] <= step]
        if len(rows) < len(self.rows):
            self.rows = rows
            self._put([_Contents(rows)])

    def _put(self, records: Sequence[Any]) -> None:
        if self._is_writer and self._outbox is None:
            self._outbox = outbox.Outbox(_Lines(self._path), name=str(self._path))
        if self._outbox is not None:
            self._outbox.put(records)

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


class _Contents:
    """A record that replaces all lines of the file by others."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = list(rows)


class _Lines:
    """The file as a sink of an `Outbox`; the first record replaces its earlier contents."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: BinaryIO | None = None
        self._n_bytes = 0

    def write(self, records: Sequence[dict[str, Any] | _Contents]) -> None:
        rows: list[dict[str, Any]] = []
        for record in records:
            if isinstance(record, _Contents):
                self._replace(record.rows)
                rows.clear()
            else:
                rows.append(record)
        assert self._file is not None
        data = memoryview(_encode(rows))
        # A failed attempt may have left a part of its lines.
        self._file.truncate(self._n_bytes)
        self._file.seek(self._n_bytes)
        n_written = 0
        while n_written < len(data):
            n_written += self._file.write(data[n_written:])
        self._n_bytes += n_written

    def _replace(self, rows: Sequence[dict[str, Any]]) -> None:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(self._path, _encode(rows))
        # Unbuffered: what was written survives the end of the process.
        self._file = self._path.open("r+b", buffering=0)
        self._n_bytes = self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _encode(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def row_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the metrics of a checkpoint as one flat dict."""
    metrics = as_summary(checkpoint).scalars
    finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
    return {"step": checkpoint.step, "seconds": round(checkpoint.elapsed_time, 6), **finite}


def _texts_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Returns the texts of a checkpoint by name, or None if it has none."""
    media = as_summary(checkpoint).media
    texts = {name: text.value for name, text in media.items() if isinstance(text, Text)}
    return {"step": checkpoint.step, **texts} if texts else None
