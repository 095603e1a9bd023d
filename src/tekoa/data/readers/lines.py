"""Lines of text files by number, without reading the files into memory.

Files are read in blocks of fixed size. The index holds, for each block, the number of lines
that start before it: 8 bytes per 16 KiB of text. It grows only as far as lines are requested.
A line is then found by a search in the index and one read of its block.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tekoa.data.batching import stacking
from tekoa.data.readers import files
from tekoa.data.readers.base import DataError, Info, RowRequest, as_array, describe

BLOCK = 2**14
_SCAN_BLOCKS = 64
_NEWLINE = 10
_MAX_LINE = 2**26


class LineReader:
    """Reads each line as an example, including blank lines.

    Args:
        paths: Text files, one after the other. Those ending in .gz are kept in memory.
        decode: Converts a line to an example; raises ValueError if it cannot.
    """

    is_lazy = True
    is_stream = False
    block_rows = 1

    def __init__(self, paths: list[str], decode: Callable[[str], Any]):
        self._files = [_File(path) for path in paths]
        self._decode = decode
        n_bytes = sum(file.size for file in self._files)
        self.name = f"lines of {files.names(paths)}: {n_bytes} bytes"
        self._ends = np.cumsum([-(-file.size // BLOCK) for file in self._files])  # In blocks.
        self._index = _LineIndex(0, 0)
        self._length: int | None = None

    @property
    def info(self) -> Info:
        return describe(self.name, self.first())

    def first(self) -> Any:
        return self.gather(RowRequest.of_rows([0]))

    def reach(self, n: int) -> int:
        """Returns `min(n, number of lines)`, indexing no further than line `n`."""
        while self._length is None and self._index.n_lines < n:
            self._scan()
        return n if self._length is None else min(n, self._length)

    def gather(self, request: RowRequest) -> Any:
        return stacking.stack([self._example(row) for row in request.rows.tolist()], self.name)

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Returns a block at or before the floor, the number of lines before it, and the length."""
        self._reach_index(floor[1])
        return [*self._index.block_of(floor[1]), self._length]

    def resume(self, anchor: Any) -> None:
        """Starts the index at the block of the anchor; earlier blocks are indexed on request."""
        block, n_before, self._length = anchor
        self._index = _LineIndex(block, n_before)

    def _example(self, row: int) -> Any:
        self._reach_index(row)
        block, n_before = self._index.block_of(row)
        file, offset = self._locate(block)
        text = file.line(offset, row - n_before)
        try:
            return self._decode(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            byte, column = error.object[error.start], error.start + 1
            problem = f"byte {byte:#04x} at column {column} is not UTF-8"
        except ValueError as error:
            problem = str(error)
        raise DataError(f"{file.path}, line {self._line_in_file(row)}: {problem}.")

    def _reach_index(self, row: int) -> None:
        """Indexes up to the line, from the start if it lies before a resumed index."""
        if row < self._index.first_line:
            self._index = _LineIndex(0, 0)
        while self._index.n_lines <= row:
            if not self._scan():
                raise IndexError(f"{self.name} has {self._length} lines, so there is no row {row}.")

    def _locate(self, block: int) -> tuple["_File", int]:
        at = int(np.searchsorted(self._ends, block, side="right"))
        return self._files[at], (block - (int(self._ends[at - 1]) if at else 0)) * BLOCK

    def _scan(self) -> bool:
        """Indexes the next blocks; at the end, sets the length and returns False."""
        block = self._index.next_block
        if block >= self._ends[-1]:
            self._length = self._index.n_lines
            return False
        file, offset = self._locate(block)
        self._index.extend(file.count_starts(offset))
        return True

    def _line_in_file(self, row: int) -> int:
        """Returns the line number within its file, from 1; reads the file again up to it."""
        block, n_before = self._index.block_of(row)
        file, offset = self._locate(block)
        scans = range(0, offset, BLOCK * _SCAN_BLOCKS)
        n_starts = sum(int(file.count_starts(at, end=offset).sum()) for at in scans)
        return n_starts + row - n_before + 1


class _LineIndex:
    """The number of lines that start before each block, from some block on."""

    def __init__(self, first_block: int, first_line: int):
        self._first_block, self.first_line = first_block, first_line
        self._starts = np.array([first_line])  # Lines before block i; the last entry is the end.
        self._size = 1

    @property
    def n_lines(self) -> int:
        return int(self._starts[self._size - 1])

    @property
    def next_block(self) -> int:
        return self._first_block + self._size - 1

    def extend(self, counts: np.ndarray) -> None:
        end = self._size + len(counts)
        if end > len(self._starts):
            self._starts = np.resize(self._starts, 2 * end)
        self._starts[self._size : end] = self.n_lines + np.cumsum(counts)
        self._size = end

    def block_of(self, row: int) -> tuple[int, int]:
        """Returns the block in which a line starts, and how many lines start before it."""
        at = int(np.searchsorted(self._starts[: self._size], row, side="right")) - 1
        return self._first_block + at, int(self._starts[at])


class _File:
    """The bytes of one file, on disk or decompressed in memory."""

    def __init__(self, path: str):
        self._fd: int | None = None
        self.path = path
        self._content = files.read_bytes(path) if str(path).endswith(".gz") else None
        self.size = files.check_readable(path) if self._content is None else len(self._content)
        self._cached = (-1, b"", np.zeros(0, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": None}

    def __del__(self, close: Callable[[int], None] = os.close):
        if self._fd is not None:  # At the end of the program, `os` may be gone already.
            close(self._fd)

    def _read(self, start: int, stop: int) -> bytes:
        if self._content is not None:
            return self._content[start:stop]
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY)
        content = os.pread(self._fd, stop - start, start)
        if len(content) < stop - start:
            raise DataError(
                f"{self.path} was truncated while being read: it had {self.size} bytes when it was "
                "opened. Do not change data files during a run."
            )
        return content

    def count_starts(self, offset: int, end: int | None = None) -> np.ndarray:
        """Counts the lines that start in each of the next blocks, up to byte `end`.

        A line starts at byte 0 and after each newline, unless the file ends there.
        """
        stop = min(self.size if end is None else end, offset + BLOCK * _SCAN_BLOCKS)
        before = self._read(max(0, offset - 1), stop - 1)
        is_start = np.frombuffer(before, np.uint8) == _NEWLINE
        if offset == 0:
            is_start = np.concatenate([[True], is_start])
        edges = np.arange(0, stop - offset, BLOCK)
        return np.add.reduceat(is_start, edges, dtype=np.int64)

    def line(self, offset: int, at: int) -> bytes:
        """Reads the `at`-th line that starts in the block at `offset`, without its newline."""
        _, text, starts = self._block(offset)
        start = int(starts[at])
        end = text.find(b"\n", start)
        while end < 0 and offset + len(text) < self.size:
            n_before = len(text)
            if n_before > _MAX_LINE:
                raise DataError(
                    f"{self.path}: the line that starts at byte {offset + start} has more than "
                    f"{_MAX_LINE} bytes. Is this a text file?"
                )
            n_next = min(2 * n_before + BLOCK, _MAX_LINE + BLOCK)
            text += self._read(offset + n_before, min(self.size, offset + n_next))
            end = text.find(b"\n", n_before)
        return text[start : end if end >= 0 else len(text)].removesuffix(b"\r")

    def _block(self, offset: int) -> tuple[int, bytes, np.ndarray]:
        """Returns a block's offset, bytes and line starts; caches the last block."""
        if self._cached[0] != offset:
            text = self._read(offset, min(self.size, offset + BLOCK))
            starts = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE) + 1
            if offset == 0 or self._read(offset - 1, offset) == b"\n":
                starts = np.concatenate([[0], starts])
            self._cached = (offset, text, starts)
        return self._cached


def text_example(text: str) -> dict[str, Any]:
    """Converts a line of plain text to an example.

    >>> text_example('a b')
    {'text': 'a b'}
    """
    return {"text": text}


def json_example(text: str) -> Any:
    """Converts a line of JSON, which must be an object, to an example.

    >>> json_example('{"x": [1, 2], "y": "a"}')
    {'x': array([1, 2]), 'y': 'a'}
    """
    if not text.strip():
        raise ValueError("the line is blank, not a JSON object")
    try:
        example = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON object is nested too deeply") from None
    if not isinstance(example, dict):
        raise ValueError(f"expected a JSON object, got {text[:40]!r}")
    return {key: as_array(v) if isinstance(v, list) else v for key, v in example.items()}
