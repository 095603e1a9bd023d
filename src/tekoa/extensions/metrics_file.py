"""MetricsFile: writes the metrics of every checkpoint as JSON lines.

A line is one object: `{"step": 100, "seconds": 1.5, "train/loss": 0.3, ...}`. Each step is there
once, also after kills and resumes: when training resumes from step n, lines after n are dropped, by
the first checkpoint at the latest.
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
from tekoa.core import files
from tekoa.extensions import outbox
from tekoa.extensions.checkpoint_files import flat_metrics
from tekoa.loop.checkpoint import Checkpoint
from tekoa.store import errors
from tekoa.store.commit import durable

FILE_NAME = "metrics.jsonl"
_MAX_LINE_BYTES = 2**22
_ADVICE = "Move it away to continue without the earlier metrics."


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
        self._step: int | None = None
        self.rows: list[dict[str, Any]] = read_metrics_file(self._path)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the line of one checkpoint, in process 0 only."""
        row = row_of(checkpoint)
        # At the start, and when a loop in this process returns to an earlier step.
        if self._step is None or checkpoint.step <= self._step:
            self.discard_after(checkpoint.step - max(1, checkpoint.n_completed_steps))
        self._step = checkpoint.step
        self.rows.append(row)
        self._put([row])
        return checkpoint

    def discard_after(self, step: int) -> None:
        """Drops the lines of later steps: training has returned to this one."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._put([_Contents(self.rows)])

    def _put(self, records: Sequence[Any]) -> None:
        if self._is_writer and self._outbox is None:
            self._outbox = outbox.Outbox(_Lines(self._path), name=str(self._path))
        if self._outbox is not None:
            self._outbox.put(records)

    def close(self) -> None:
        """Writes the remaining lines and closes the file."""
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
    metrics = flat_metrics(checkpoint)
    finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
    return {"step": checkpoint.step, "seconds": round(checkpoint.elapsed_time, 6), **finite}


def read_metrics_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file; the last one is left out if a kill cut it off.

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
