"""MetricsFile: writes the metrics of every checkpoint as JSON lines.

A line is one object: `{"step": 100, "seconds": 1.5, "train/loss": 0.3, ...}`. Each step is there
once, also after kills and resumes: when training resumes from step n, lines after n are dropped.
NaN and infinity are null, as JSON has no such numbers.

Lines are written in the background; see `outbox.py`. A full disk does not stop training: lines are
written once there is space.
"""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from tekoa import hosts
from tekoa.extensions import outbox
from tekoa.extensions.checkpoint_files import flat_metrics
from tekoa.loop.checkpoint import Checkpoint
from tekoa.store.commit import durable

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends the metrics of each checkpoint to a file; a stage for `serial`.

    Place it before the checkpoint writer: every step that was committed then has its line.

    Args:
        path: The file; its directory is created if necessary.

    Attributes:
        rows: All lines of the file so far, those of earlier starts included.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        self._is_writer = hosts.current().is_writer
        self._outbox: outbox.Outbox | None = None
        self._is_open = False
        self.rows: list[dict[str, Any]] = read_metrics_file(self._path)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the line of one checkpoint, in process 0 only."""
        row = row_of(checkpoint)
        if not self._is_open:
            self._open(checkpoint.step - max(1, checkpoint.n_completed_steps))
        self.rows.append(row)
        if self._outbox is not None:
            self._outbox.put([row])
        return checkpoint

    def _open(self, step: int) -> None:
        """Starts to write, after the lines up to a step."""
        self._is_open = True
        self.rows = [row for row in self.rows if row["step"] <= step]
        if self._is_writer:
            lines = _Lines(self._path, self.rows)
            self._outbox = outbox.Outbox(lines, name=str(self._path))

    def close(self) -> None:
        """Writes the remaining lines and closes the file."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


class _Lines:
    """The file as a sink of an `Outbox`; the first write replaces its earlier contents."""

    def __init__(self, path: pathlib.Path, earlier: Sequence[dict[str, Any]]):
        self._path, self._earlier = path, list(earlier)
        self._file: BinaryIO | None = None
        self._n_bytes = 0

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, _encode(self._earlier))
            # Unbuffered: what was written survives the end of the process.
            self._file = self._path.open("r+b", buffering=0)
            self._n_bytes = self._file.seek(0, os.SEEK_END)
        data = memoryview(_encode(records))
        # A failed attempt may have left a part of its lines.
        self._file.truncate(self._n_bytes)
        self._file.seek(self._n_bytes)
        n_written = 0
        while n_written < len(data):
            n_written += self._file.write(data[n_written:])
        self._n_bytes += n_written

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
    metrics = flat_metrics(checkpoint)
    finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
    return {"step": checkpoint.step, "seconds": round(checkpoint.elapsed_time, 6), **finite}


def read_metrics_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file; the last one is left out if a kill cut it off.

    Raises:
        ValueError: If another line is not a JSON object with a step.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number}, is not a JSON object with a 'step': {line[:60]!r}. Move "
                "the file away to continue without the earlier metrics."
            ) from None
        rows.append(row)
    return rows
