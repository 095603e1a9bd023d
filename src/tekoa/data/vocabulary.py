"""The words of a language model and their numbers."""

import array
from pathlib import Path

import numpy as np

from tekoa.data import files
from tekoa.data.reader import DataError

START, END, UNKNOWN = "<s>", "</s>", "<unk>"


class Vocabulary:
    """Numbers words by their place in a list.

    >>> Vocabulary(['<s>', '</s>', 'a', 'b']).encode(b'a b a', 'a file')
    array([2, 3, 2, 1], dtype=int32)
    """

    def __init__(self, words: list[str], name: str = "vocabulary"):
        self.words, self._name = words, name
        self._ids = {word: at for at, word in enumerate(words)}
        if END not in self._ids:
            raise DataError(f"{name} has no {END!r}, which stands for the end of a line. Add it.")
        self.end_id = self._ids[END]
        self.start_id = self._ids.get(START)
        self._unknown_id = self._ids.get(UNKNOWN)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: bytes, path: str | Path) -> np.ndarray:
        """Numbers the words of a text, with an end mark after each line.

        Args:
            text: UTF-8 text; words stand between blanks.
            path: Where it comes from, for messages.

        Raises:
            DataError: At a word that is not in the vocabulary, if that has no `<unk>`, or at
                bytes that are no UTF-8; it names word, file and line.
        """
        ids = array.array("i")
        for at, raw in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
            try:
                words = raw.decode("utf-8").split()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {at}: byte {raw[error.start]:#04x} at column {error.start + 1} "
                    "is no UTF-8."
                ) from None
            if self._unknown_id is not None:
                ids.extend([self._ids.get(word, self._unknown_id) for word in words])
            else:
                ids.extend([self._known(word, path, at) for word in words])
            ids.append(self.end_id)
        return np.array(ids, np.int32)

    def _known(self, word: str, path: str | Path, line: int) -> int:
        at = self._ids.get(word)
        if at is None:
            raise DataError(
                f"{path}, line {line}: the word {word!r} is not in {self._name}. Add it, or add "
                f"{UNKNOWN!r} to stand for all such words."
            )
        return at


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Reads a vocabulary file: one word a line, whatever follows it (a count) is left out."""
    words: list[str] = []
    seen: dict[str, int] = {}
    text = files.read_bytes(path)
    for at, raw in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            columns = raw.decode("utf-8").split()
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {at}: the word is no UTF-8: {raw!r}.") from None
        if not columns:
            raise DataError(f"{path}, line {at} is blank; a vocabulary has one word a line.")
        if columns[0] in seen:
            raise DataError(
                f"{path}, line {at}: the word {columns[0]!r} stands in line {seen[columns[0]]} too."
            )
        seen[columns[0]] = at
        words.append(columns[0])
    return Vocabulary(words, str(path))
