"""Token streams for language models: text cut into sequences of equal length, and vocabularies."""

import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import patterns
from tekoa.data.batching import permutation
from tekoa.data.readers import files
from tekoa.data.readers.base import Batch, DataError, RandomAccess, RowRequest, describe
from tekoa.data.source import Source

START, END, UNKNOWN = "<s>", "</s>", "<unk>"

# Separates the random skip of an epoch from other numbers with the same seed and epoch.
_SKIP = 0x5C1B


def tokens(
    path: str | Path | Sequence[str],
    vocab_path: str | Path | None,
    seq_length: int,
    *,
    random_skip: bool = False,
) -> Source:
    """Opens text as a stream of tokens, cut into sequences of `seq_length`.

    An example has `tokens`, int32 of shape (seq_length,), and `token_mask`, False after the end
    of the stream. Each example continues where the previous one ends. `info.facts` contains
    `n_tokens`, `start_id` and `end_id`; `info.n_classes` is the size of the vocabulary.

    Args:
        path: Text files (pattern or list), read one after the other; each line ends in `</s>`.
        vocab_path: File with one `word count` pair per line; only the words are used. If None,
            the bytes of the files are the tokens, without end markers.
        seq_length: Number of tokens in an example.
        random_skip: For training: each epoch starts at a random one of the first `seq_length`
            tokens, and the incomplete sequences at both ends are dropped. If False, the stream
            is read exactly once, and the last sequence is padded.

    Raises:
        DataError: If a file is missing or empty, or a word is not in the vocabulary and the
            vocabulary has no `<unk>`.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length must be at least 1, got {seq_length}.")
    paths = patterns.filenames(path)
    if not paths:
        raise DataError(f"{path!r} matches no text file. Pass the path or glob of a text file.")
    if vocab_path is None:
        parts = [np.frombuffer(files.read_bytes(p), np.uint8) for p in paths]
        facts: dict[str, Any] = {"start_id": None, "end_id": None}
        n_classes = 256
    else:
        vocabulary = read_vocabulary(vocab_path)
        parts = [vocabulary.encode(files.read_bytes(p), p) for p in paths]
        facts = {"start_id": vocabulary.start_id, "end_id": vocabulary.end_id}
        n_classes = len(vocabulary)
    stream = np.concatenate(parts).astype(np.int32)
    facts["n_tokens"] = len(stream)
    name = f"tokens of {files.names(paths)}, {n_classes} kinds"
    options = {"random_skip": random_skip, "n_classes": n_classes, "facts": facts}
    return Source(TokenReader(stream, seq_length, name, **options))


class TokenReader(RandomAccess):
    """Reads sequences of equal length from a long array of tokens."""

    def __init__(
        self, stream: np.ndarray, seq_length: int, name: str, *, random_skip: bool, **facts: Any
    ):
        self._stream, self._seq_length = stream, seq_length
        n_tokens = len(stream)
        if random_skip:
            # The number of sequences must not depend on the number of skipped tokens.
            self._length = max(1, (n_tokens - seq_length + 1) // seq_length)
            self._n_skips = min(seq_length, n_tokens - self._length * seq_length + 1)
        else:
            self._length, self._n_skips = -(-n_tokens // seq_length), 1
        if n_tokens < seq_length and random_skip:
            raise DataError(
                f"{name}: {n_tokens} tokens do not fill one sequence of {seq_length}. Use a "
                "smaller seq_length or more text."
            )
        self.block_rows = max(1, 2**17 // seq_length)
        skip = " with random skip" if random_skip else ""
        self.name = f"{name}: {n_tokens} by {seq_length}{skip}"
        self.info = describe(self.name, self.first(), **facts)

    def __len__(self) -> int:
        return self._length

    def gather(self, request: RowRequest) -> Batch:
        epochs, inverse = np.unique(request.epochs, return_inverse=True)
        skips = [permutation.below(self._n_skips, (request.seed, int(e), _SKIP)) for e in epochs]
        starts = request.rows * self._seq_length + np.array(skips, np.int64)[inverse]
        at = starts[:, None] + np.arange(self._seq_length)
        return {"tokens": self._stream.take(at, mode="clip"), "token_mask": at < len(self._stream)}


class Vocabulary:
    """Maps words to their index in a list.

    >>> Vocabulary(['<s>', '</s>', 'a', 'b']).encode(b'a b a', 'a file')
    array([2, 3, 2, 1], dtype=int32)
    """

    def __init__(self, words: list[str], name: str = "vocabulary"):
        self.words, self._name = words, name
        self._ids = {word: at for at, word in enumerate(words)}
        if END not in self._ids:
            raise DataError(f"{name} has no {END!r}, which marks the end of a line. Add it.")
        self.end_id = self._ids[END]
        self.start_id = self._ids.get(START)
        self._unknown_id = self._ids.get(UNKNOWN)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: bytes, path: str | Path) -> np.ndarray:
        """Converts text to token ids, with an end marker after each line.

        Args:
            text: UTF-8 text; words are separated by whitespace.
            path: Where the text comes from, for messages.

        Raises:
            DataError: If a word is not in the vocabulary and there is no `<unk>`, or if the
                text is not UTF-8.
        """
        ids = array.array("i")
        for at, words in _lines_of_words(text, path):
            if self._unknown_id is not None:
                ids.extend([self._ids.get(word, self._unknown_id) for word in words])
            else:
                ids.extend([self._id_of(word, path, at) for word in words])
            ids.append(self.end_id)
        return np.array(ids, np.int32)

    def _id_of(self, word: str, path: str | Path, line: int) -> int:
        if word not in self._ids:
            raise DataError(
                f"{path}, line {line}: the word {word!r} is not in {self._name}. Add it, or add "
                f"{UNKNOWN!r} for all unknown words."
            )
        return self._ids[word]


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Reads a vocabulary: the first word of each line; the rest, such as a count, is ignored."""
    line_of_word: dict[str, int] = {}
    for at, columns in _lines_of_words(files.read_bytes(path), path):
        if not columns:
            raise DataError(f"{path}, line {at} is blank. A vocabulary has one word on each line.")
        word = columns[0]
        if word in line_of_word:
            raise DataError(
                f"{path}, line {at}: the word {word!r} is already on line {line_of_word[word]}. "
                "Remove one of them."
            )
        line_of_word[word] = at
    return Vocabulary(list(line_of_word), str(path))


def _lines_of_words(text: bytes, path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line, from 1, and its words."""
    for at, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            words = line.decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {at}: byte {line[error.start]:#04x} at column {error.start + 1} "
                "is not UTF-8. Save the file as UTF-8."
            ) from None
        yield at, words
