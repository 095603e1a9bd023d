"""Vocabularies of words, and tokenizers of the `tokenizers` package, as maps from text to ids."""

import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data.readers import files
from tekoa.data.readers.base import DataError

START, END, UNKNOWN = "<s>", "</s>", "<unk>"

# Tokens that end and start a text, by the names that trained tokenizers use for them.
_END_NAMES = (END, "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
_START_NAMES = (START, "<|begin_of_text|>", "<bos>", "[BOS]", "[CLS]", "<|endoftext|>")


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

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Converts texts to token ids, each with an end marker."""
        return [self.encode(" ".join(text.split()).encode(), "the text") for text in texts]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Converts the beginning of a text to token ids: its last line has no end marker."""
        return self.encode(f"{text}\n".encode(), "the prompt")[:-1]

    def decode(self, ids: Sequence[int]) -> str:
        """Converts token ids to words; an end marker ends a line.

        >>> print(Vocabulary(['<s>', '</s>', 'a', 'b']).decode([2, 3, 1, 2]))
        a b
        a
        """
        lines = _split(ids, self.end_id)
        return "\n".join(" ".join(self.words[i] for i in line) for line in lines)

    def _id_of(self, word: str, path: str | Path, line: int) -> int:
        if word not in self._ids:
            raise DataError(
                f"{path}, line {line}: the word {word!r} is not in {self._name}. Add it, or add "
                f"{UNKNOWN!r} for all unknown words."
            )
        return self._ids[word]


class Tokenizer:
    """A tokenizer of the `tokenizers` package, or of `transformers` if it is a fast one.

    Special tokens are added to no text, except the end marker after each line. The markers are
    found by their usual names, such as `</s>`, `<|endoftext|>` or `[SEP]`.

    Args:
        source: The tokenizer, or the path of its tokenizer.json.
    """

    def __init__(self, source: Any):
        is_file = isinstance(source, (str, Path))
        name = source if is_file else f"The {type(source).__name__}"
        tokenizer = _read_tokenizer(source) if is_file else source
        self._tokenizer: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(self._tokenizer, "encode_batch_fast"):
            raise DataError(
                f"{name} is neither a vocabulary nor a tokenizer of the `tokenizers` package. Pass "
                "one of these, or its file."
            )
        self._size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        end_id = self._first_id(_END_NAMES)
        if end_id is None:
            raise DataError(
                f"{name} has no token that marks the end of a text: none of {list(_END_NAMES)}. "
                "Add one to its special tokens."
            )
        self.end_id, self.start_id = end_id, self._first_id(_START_NAMES)

    def __len__(self) -> int:
        return self._size

    def encode(self, text: bytes, path: str | Path) -> np.ndarray:
        """Converts UTF-8 text to token ids, with an end marker after each line."""
        lines = text.removesuffix(b"\n").split(b"\n")
        texts = [_decode(line, path, at) for at, line in enumerate(lines, start=1)]
        return np.concatenate(self.encode_texts(texts))

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Converts texts to token ids, each with an end marker."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.end_id], np.int32) for encoding in encodings]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Converts the beginning of a text to token ids: its last line has no end marker."""
        return self.encode(f"{text}\n".encode(), "the prompt")[:-1]

    def decode(self, ids: Sequence[int]) -> str:
        """Converts token ids to text; an end marker ends a line."""
        lines = _split(ids, self.end_id)
        return "\n".join(self._tokenizer.decode(line, skip_special_tokens=False) for line in lines)

    def _first_id(self, names: Sequence[str]) -> int | None:
        ids = map(self._tokenizer.token_to_id, names)
        return next((number for number in ids if number is not None), None)


def _read_tokenizer(path: str | Path) -> Any:
    tokenizers = files.require("tokenizers", "tokenizers", f"Reading {path}")
    content = files.read_bytes(path)
    try:
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # The package raises nothing more specific.
        raise DataError(f"{path} is not the tokenizer.json of a tokenizer: {error}.") from None


class Bytes:
    """The bytes of a text as tokens; each line ends in a newline."""

    start_id: int | None = None
    end_id = ord("\n")

    def __len__(self) -> int:
        return 256

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Converts texts to their UTF-8 bytes, each with a newline.

        >>> Bytes().encode_texts(['ab'])
        [array([97, 98, 10], dtype=int32)]
        """
        return [self.encode_prompt(f"{text}\n") for text in texts]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Converts the beginning of a text to its UTF-8 bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Converts bytes to text; what is not UTF-8 becomes a replacement character.

        >>> Bytes().decode([97, 98, 255, 256])
        'ab\ufffd\ufffd'
        """
        # 255 occurs in no text: neither do numbers that are no bytes.
        return bytes(min(i, 255) for i in ids).decode(errors="replace")


def read_vocabulary(path: str | Path) -> "Vocabulary | Tokenizer":
    """Reads a tokenizer.json, or a list of words.

    In a list, the first word of each line counts; the rest, such as a count, is ignored.
    """
    if str(path).endswith(".json"):
        return Tokenizer(path)
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


def _split(ids: Sequence[int], end_id: int) -> list[list[int]]:
    """Splits tokens at the end markers, which are left out."""
    lines: list[list[int]] = [[]]
    for i in ids:
        if i == end_id:
            lines.append([])
        else:
            lines[-1].append(i)
    return lines


def _lines_of_words(text: bytes, path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line, from 1, and its words."""
    for at, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        yield at, _decode(line, path, at).split()


def _decode(line: bytes, path: str | Path, at: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {at}: byte {line[error.start]:#04x} at column {error.start + 1} "
            "is not UTF-8. Save the file as UTF-8."
        ) from None
