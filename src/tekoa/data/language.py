"""Token streams for language models: a text cut into sequences of one length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import files, patterns, permutation, vocabulary
from tekoa.data.reader import Batch, DataError, Draw, RandomAccess, describe
from tekoa.data.source import Source

# Tells the draw of an epoch's skip from other draws with the same seed and epoch.
_SKIP = 0x5C1B


def tokens(
    path: str | Path | Sequence[str],
    vocab_path: str | Path | None,
    seq_length: int,
    *,
    random_skip: bool = False,
) -> Source:
    """Opens text as a stream of tokens, cut into sequences of `seq_length`.

    An example has `tokens`, int32 of shape (seq_length,), and `token_mask`, False where the
    stream has ended. The next example goes on where this one ends. `info.facts` has
    `n_tokens`, `start_id` and `end_id`; `info.n_classes` is the size of the vocabulary.

    Args:
        path: Text files (pattern or list), read one after the other; each line ends in `</s>`.
        vocab_path: File of `word count` lines, the first column used. None takes the bytes
            of the files as tokens, without end marks.
        seq_length: Tokens in an example.
        random_skip: For training: each epoch starts at another of the first `seq_length` tokens,
            and the incomplete sequences at both ends are left out. Without it, the whole
            stream is given exactly once, the last sequence filled up.

    Raises:
        DataError: If a file is missing or empty, or a word is not in a vocabulary that has no
            `<unk>`.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length must be at least 1, got {seq_length}.")
    paths = patterns.filenames(path)
    if not paths:
        raise DataError(f"{path!r} names no text file.")
    if vocab_path is None:
        parts = [np.frombuffer(files.read_bytes(p), np.uint8) for p in paths]
        facts: dict[str, Any] = {"start_id": None, "end_id": None}
        n_classes = 256
    else:
        words = vocabulary.read_vocabulary(vocab_path)
        parts = [words.encode(files.read_bytes(p), p) for p in paths]
        facts = {"start_id": words.start_id, "end_id": words.end_id}
        n_classes = len(words)
    stream = np.concatenate(parts).astype(np.int32)
    return Source(
        TokenReader(
            stream,
            seq_length,
            f"tokens of {files.names(paths)}, {n_classes} kinds",
            random_skip=random_skip,
            n_classes=n_classes,
            facts={**facts, "n_tokens": len(stream)},
        )
    )


class TokenReader(RandomAccess):
    """Sequences of one length out of a long array of tokens."""

    def __init__(
        self, stream: np.ndarray, seq_length: int, name: str, *, random_skip: bool, **facts: Any
    ):
        self._stream, self._seq_length = stream, seq_length
        n_tokens = len(stream)
        if random_skip:
            # The same number of sequences in each epoch, whatever is skipped.
            self._length = max(1, (n_tokens - seq_length + 1) // seq_length)
            self._n_skips = min(seq_length, n_tokens - self._length * seq_length + 1)
        else:
            self._length, self._n_skips = -(-n_tokens // seq_length), 1
        if n_tokens < seq_length and random_skip:
            raise DataError(f"{name}: {n_tokens} tokens do not fill one sequence of {seq_length}.")
        self.block_rows = max(1, 2**17 // seq_length)
        skip = " with random skip" if random_skip else ""
        self.name = f"{name}: {n_tokens} by {seq_length}{skip}"
        self.info = describe(self.name, self.first(), **facts)

    def __len__(self) -> int:
        return self._length

    def gather(self, draw: Draw) -> Batch:
        """Cuts the sequences out of the stream, each epoch from its own start."""
        starts = draw.rows * self._seq_length + self._skips(draw)
        at = starts[:, None] + np.arange(self._seq_length)
        return {"tokens": self._stream.take(at, mode="clip"), "token_mask": at < len(self._stream)}

    def _skips(self, draw: Draw) -> np.ndarray:
        epochs, inverse = np.unique(draw.epochs, return_inverse=True)
        skips = [permutation.below(self._n_skips, (draw.seed, int(e), _SKIP)) for e in epochs]
        return np.array(skips, np.int64)[inverse]
