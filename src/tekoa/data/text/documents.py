"""Documents for language models: the tokens of one text each, of different lengths."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import interop
from tekoa.data.batching import stacking
from tekoa.data.readers.base import DataError, RandomAccess, RowRequest, describe
from tekoa.data.source import Source
from tekoa.data.text.vocabulary import Bytes, Tokenizer, Vocabulary, read_vocabulary

# Texts that are tokenized in one call.
_BLOCK = 4096


def documents(data: Any, vocab: Any = None, *, field: str = "text") -> Source:
    """Opens texts as documents: an example has the `tokens` of one text, with an end marker.

    Examples have different lengths, so they need `pack` or `bucket` before they form batches.
    Texts without a word are left out. All tokens are held in memory, 4 bytes each.

    Args:
        data: Anything that `as_source` accepts, with text in `field`: text files, of which each
            line is a document, .jsonl or .parquet files, a `datasets.Dataset`, a list such as
            [{'text': 'to be'}], ... Strings are patterns of files.
        vocab: A `Vocabulary` or its file; a tokenizer of the `tokenizers` package, a fast one of
            `transformers`, or the path of its tokenizer.json; None uses bytes as tokens.
        field: The field of the text.

    Raises:
        DataError: If there is no such field, or no text.

    >>> source = documents([{'text': 'to be'}, {'text': 'or not'}, {'text': 'be'}])
    >>> source[2]['tokens'], len(source.pack(10))
    (array([ 98, 101,  10], dtype=int32), 2)
    """
    # A mixture has no order of documents: they are packed first, and then mixed.
    source = Source(interop.as_source(data).rows_for("documents"))
    vocabulary = _vocabulary(vocab)
    parts: list[np.ndarray] = []
    # Other fields may have different lengths, so only the text is stacked.
    texts = source.map(functools.partial(_text, field))
    for batch in texts.batches(_BLOCK, epochs=1, remainder="keep"):
        parts += vocabulary.encode_texts([text for text in batch["text"] if text.strip()])
    if not parts:
        raise DataError(f"{source.reader.name} contains no text in its field {field!r}.")
    facts = {
        "start_id": vocabulary.start_id,
        "end_id": vocabulary.end_id,
        "n_tokens": sum(map(len, parts)),
        "vocabulary": vocabulary,
    }
    name = f"documents of {source.reader.name}, {len(vocabulary)} kinds"
    return Source(DocumentReader(parts, name, n_classes=len(vocabulary), facts=facts))


def _vocabulary(vocab: Any) -> Vocabulary | Tokenizer | Bytes:
    if vocab is None:
        return Bytes()
    if isinstance(vocab, (str, Path)):
        return read_vocabulary(vocab)
    return vocab if isinstance(vocab, (Vocabulary, Tokenizer, Bytes)) else Tokenizer(vocab)


def _text(field: str, example: Any) -> dict[str, str]:
    text = example.get(field) if isinstance(example, dict) else None
    if not isinstance(text, str):
        fields = sorted(example) if isinstance(example, dict) else type(example).__name__
        raise DataError(
            f"There is no text in a field {field!r}: the examples have {fields}. Name the field of "
            "the text."
        )
    return {"text": text}


class DocumentReader(RandomAccess):
    """Reads documents, given as arrays of tokens of different lengths."""

    def __init__(self, parts: Sequence[np.ndarray], name: str, **facts: Any):
        self.lengths = np.array([len(part) for part in parts], np.int64)
        self._ends, self._stream = np.cumsum(self.lengths), np.concatenate(parts)
        self.name = f"{name}: {len(parts)} of {len(self._stream)} tokens"
        self.info = describe(self.name, self.first(), **facts)

    def __len__(self) -> int:
        return len(self._ends)

    def gather(self, request: RowRequest) -> Any:
        ends = self._ends[request.rows]
        starts = ends - self.lengths[request.rows]
        tokens = [self._stream[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
        if len(tokens) == 1:
            return {"tokens": tokens[0][None]}
        return stacking.stack([{"tokens": part} for part in tokens], self.name)
