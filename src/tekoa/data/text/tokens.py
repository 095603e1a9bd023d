"""Token streams for language models: text cut into sequences of equal length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import mixing, patterns
from tekoa.data.batching import permutation
from tekoa.data.readers import files
from tekoa.data.readers.base import Batch, DataError, RandomAccess, RowRequest, describe
from tekoa.data.source import Source
from tekoa.data.text.vocabulary import Bytes, read_vocabulary

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
    `n_tokens`, `start_id`, `end_id` and the `vocabulary`, with its methods `encode_prompt(text)`
    and `decode(ids)`; `info.n_classes` is its size.

    Args:
        path: Text files (pattern or list), read one after the other; each line ends in `</s>`.
            A `mix://` pattern mixes the sequences of several texts.
        vocab_path: File with one `word count` pair per line, of which only the words are used, or
            the tokenizer.json of a Hugging Face tokenizer. If None, the bytes of the files are
            the tokens, without end markers.
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
    if isinstance(path, str) and mixing.is_mixture(path):
        return mixing.open_parts(
            path, lambda part: tokens(part, vocab_path, seq_length, random_skip=random_skip)
        )
    paths = patterns.filenames(path)
    if not paths:
        raise DataError(f"{path!r} matches no text file. Pass the path or glob of a text file.")
    if vocab_path is None:
        vocabulary = Bytes()
        parts = [np.frombuffer(files.read_bytes(p), np.uint8) for p in paths]
        facts: dict[str, Any] = {"start_id": None, "end_id": None}
    else:
        vocabulary = read_vocabulary(vocab_path)
        parts = [vocabulary.encode(files.read_bytes(p), p) for p in paths]
        facts = {"start_id": vocabulary.start_id, "end_id": vocabulary.end_id}
    stream, n_classes = np.concatenate(parts).astype(np.int32), len(vocabulary)
    facts |= {"n_tokens": len(stream), "vocabulary": vocabulary}
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
