"""Lines of text files by number, without reading the files into memory.

Files are looked at in blocks of fixed size. The index holds, for every block, how many lines
start before it, and grows only as far as lines are asked for: 8 bytes per 16 KiB of text. A
line is then found by a search in the index and one read of its block.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tekoa.data import files, stacking
from tekoa.data.reader import DataError, Draw, Info, as_array, describe

BLOCK = 2**14
_SCAN_BLOCKS = 64
_NEWLINE = 10


class LineReader:
    """Each line an example; blank lines too.

    Args:
        paths: Text files, one after the other. Those ending in .gz are held in memory.
        decode: Makes an example of a line; raises ValueError if it cannot.
    """

    is_lazy = True
    is_stream = False
    block_rows = 1

    def __init__(self, paths: list[str], decode: Callable[[str], Any]):
        self._files = [_open(path) for path in paths]
        self._decode = decode
        n_bytes = sum(file.size for file in self._files)
        self.name = f"lines of {files.names(paths)}: {n_bytes} bytes"
        blocks = [-(-file.size // BLOCK) for file in self._files]
        self._ends = np.cumsum(blocks)
        self._index = _LineIndex(0, 0)
        self._length: int | None = None

    @property
    def info(self) -> Info:
        """Shapes and dtypes of the first line's example."""
        return describe(self.name, self.first())

    def first(self) -> Any:
        """Gives the first line's example as a batch of one."""
        return self.gather(Draw.of_rows([0]))

    def reach(self, n: int) -> int:
        """Gives `min(n, lines)`, indexing no further than line `n`."""
        while self._length is None and self._index.n_lines < n:
            self._scan()
        return n if self._length is None else min(n, self._length)

    def gather(self, draw: Draw) -> Any:
        """Reads and decodes the lines."""
        return stacking.stack([self._example(row) for row in draw.rows.tolist()], self.name)

    def anchor(self, floor: tuple[int, int]) -> Any:
        """Gives a block at or before the floor, how many lines precede it, and the length."""
        self._reach_index(floor[1])
        return [*self._index.block_of(floor[1]), self._length]

    def resume(self, anchor: Any) -> None:
        """Indexes from the noted block on; what lies before it is indexed when asked for."""
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
            problem = (
                f"byte {error.object[error.start]:#04x} at column {error.start + 1} is no UTF-8"
            )
        except ValueError as error:
            problem = str(error)
        raise DataError(f"{file.path}, line {self._line_in_file(row)}: {problem}.")

    def _reach_index(self, row: int) -> None:
        """Indexes up to the line; from the start if it lies before a resumed index."""
        if row < self._index.first_line:
            self._index = _LineIndex(0, 0)
        while self._index.n_lines <= row:
            if not self._scan():
                raise IndexError(f"{self.name} has {self._length} lines; {row} is not one.")

    def _locate(self, block: int) -> tuple["_File", int]:
        at = int(np.searchsorted(self._ends, block, side="right"))
        return self._files[at], (block - (int(self._ends[at - 1]) if at else 0)) * BLOCK

    def _scan(self) -> bool:
        """Indexes the next blocks of one file, or notes the length if there is none."""
        block = self._index.next_block
        if block >= self._ends[-1]:
            self._length = self._index.n_lines
            return False
        file, offset = self._locate(block)
        self._index.extend(file.count_starts(offset))
        return True

    def _line_in_file(self, row: int) -> int:
        """Counts the line within its file, from 1; reads the file again up to it."""
        block, n_before = self._index.block_of(row)
        file, offset = self._locate(block)
        n_starts = sum(file.count_starts(at).sum() for at in range(0, offset, BLOCK * _SCAN_BLOCKS))
        if offset % (BLOCK * _SCAN_BLOCKS):
            last = offset - offset % (BLOCK * _SCAN_BLOCKS)
            n_starts -= file.count_starts(last)[(offset - last) // BLOCK :].sum()
        return int(n_starts) + row - n_before + 1


class _LineIndex:
    """How many lines start before each block, from some block on."""

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
        if self._size + len(counts) > len(self._starts):
            self._starts = np.resize(self._starts, 2 * (self._size + len(counts)))
        end = self._size + len(counts)
        self._starts[self._size : end] = self.n_lines + np.cumsum(counts)
        self._size = end

    def block_of(self, row: int) -> tuple[int, int]:
        """Gives the block in which a line starts, and how many lines start before it."""
        at = int(np.searchsorted(self._starts[: self._size], row, side="right")) - 1
        return self._first_block + at, int(self._starts[at])


class _File:
    """Bytes of one file: on disk, or decompressed in memory."""

    def __init__(self, path: str, content: bytes | None = None):
        self._fd: int | None = None
        self.path, self._content = path, content
        self.size = files.check_readable(path) if content is None else len(content)
        self._cached = (-1, b"", np.zeros(0, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": None}

    def __del__(self):
        if self._fd is not None:
            os.close(self._fd)

    def _read(self, start: int, stop: int) -> bytes:
        if self._content is not None:
            return self._content[start:stop]
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY)
        content = os.pread(self._fd, stop - start, start)
        if len(content) < stop - start:
            raise DataError(f"{self.path} became shorter than {self.size} bytes while being read.")
        return content

    def count_starts(self, offset: int) -> np.ndarray:
        """Counts the lines that start in each of the next blocks.

        A line starts at byte 0 and after each newline, unless the file ends there.
        """
        stop = min(self.size, offset + BLOCK * _SCAN_BLOCKS)
        before = self._read(max(0, offset - 1), stop - 1)
        is_start = np.frombuffer(before, np.uint8) == _NEWLINE
        if offset == 0:
            is_start = np.concatenate([[True], is_start])
        edges = np.arange(0, stop - offset, BLOCK)
        return np.add.reduceat(is_start, edges, dtype=np.int64)

    def line(self, offset: int, at: int) -> bytes:
        """Reads the `at`-th line that starts in the block at `offset`, without its end."""
        _, text, starts = self._block(offset)
        start = int(starts[at])
        end = text.find(b"\n", start)
        while end < 0 and offset + len(text) < self.size:
            n_before = len(text)
            text += self._read(offset + n_before, min(self.size, offset + 2 * n_before + BLOCK))
            end = text.find(b"\n", n_before)
        return text[start : end if end >= 0 else len(text)].removesuffix(b"\r")

    def _block(self, offset: int) -> tuple[int, bytes, np.ndarray]:
        """Gives a block's bytes and where its lines start; the last one is kept."""
        if self._cached[0] != offset:
            text = self._read(offset, min(self.size, offset + BLOCK))
            starts = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE) + 1
            if offset == 0 or self._read(offset - 1, offset) == b"\n":
                starts = np.concatenate([[0], starts])
            self._cached = (offset, text, starts)
        return self._cached


def _open(path: str) -> _File:
    return _File(path, files.read_bytes(path) if str(path).endswith(".gz") else None)


def text_example(text: str) -> dict[str, Any]:
    """Makes the example of a line of plain text.

    >>> text_example('a b')
    {'text': 'a b'}
    """
    return {"text": text}


def json_example(text: str) -> Any:
    """Makes the example of a line of JSON, which must be an object.

    >>> json_example('{"x": [1, 2], "y": "a"}')
    {'x': array([1, 2]), 'y': 'a'}
    """
    if not text.strip():
        raise ValueError("the line is blank, not a JSON object")
    example = json.loads(text)
    if not isinstance(example, dict):
        raise ValueError(f"expected a JSON object, found {text[:40]!r}")
    return {key: as_array(v) if isinstance(v, list) else v for key, v in example.items()}
