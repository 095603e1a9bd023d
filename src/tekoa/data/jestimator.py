"""Data functions in the form of JEstimator's model files.

Sharding selects every n-th example, independent of the files. The loop shuffles and repeats
batches and splits them over processes, so that the data position can be saved.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import interop, patterns
from tekoa.data.readers import files
from tekoa.data.readers.views import Concatenated
from tekoa.data.source import Source
from tekoa.data.text.tokens import TokenReader


@dataclasses.dataclass(frozen=True)
class DataFn:
    """Opens one shard of some files: `fn(filenames, shard_num, shard_index, epochs, num_take)`.

    Attributes:
        open_fn: Opens the files; returns data in any form that `as_source` accepts.
        feature_fn: Converts each example to the model's input.

    >>> fn = DataFn(feature_fn=lambda example: {'label': example['label']})
    >>> len(fn(['digits://split=test'], shard_num=2))
    180
    """

    open_fn: Callable[[Any], Any] = patterns.load
    feature_fn: Callable[[Any], Any] | None = None

    def __call__(
        self,
        filenames: str | Sequence[str],
        shard_num: int = 1,
        shard_index: int = 0,
        epochs: int | None = 1,
        num_take: int = -1,
    ) -> Source:
        """Opens the files.

        Args:
            filenames: A pattern, or the result of `tekoa.data.filenames`.
            shard_num: Number of shards.
            shard_index: Which shard to return: every `shard_num`-th example from here on.
            epochs: Number of passes that `batches(epochs=1)` makes; None repeats forever.
            num_take: Number of examples to use, before sharding; -1 uses all.
        """
        source = interop.as_source(self.open_fn(filenames))
        source = source.take(num_take).shard(shard_index, shard_num).repeat(epochs)
        return source if self.feature_fn is None else source.map(self.feature_fn)


def rec_data(
    dataset_fn: Callable[[str], Any] = patterns.load,
    cache: bool = False,
    feature_fn: Callable[[Any], Any] | None = None,
    interleave: bool = False,
) -> DataFn:
    """Creates a data function for files whose records are examples.

    Args:
        dataset_fn: Opens one file, or one pattern such as `tfds://NAME/split=train`; returns
            data in any form that `as_source` accepts.
        cache: If true, all examples are read into memory once. Required for several files that
            can only be read forwards.
        feature_fn: Converts each example to the model's input.
        interleave: If true, examples alternate between the files: the first of each, then the
            second of each.

    >>> fn = rec_data(lambda name: [{'file': name, 'row': i} for i in range(2)], interleave=True)
    >>> [str(example['file']) for example in fn(['a', 'b'])]
    ['a', 'b', 'a', 'b']
    """

    def open_one(name: str) -> Source:
        source = interop.as_source(dataset_fn(name))
        return interop.as_source(list(source)) if cache else source

    return DataFn(lambda names: join([open_one(name) for name in names], interleave), feature_fn)


def lm_data(
    seq_length: int,
    allow_remainder: bool = False,
    dataset_fn: Callable[[str], Any] | None = None,
    cache: bool = False,
    random_skip: bool = False,
    feature_fn: Callable[[Any], Any] | None = None,
    interleave: bool = False,
) -> DataFn:
    """Creates a data function for files of tokens, cut into sequences.

    Args:
        seq_length: Number of tokens in an example.
        allow_remainder: If true, the last sequence of each file may be shorter; `feature_fn`
            must then return examples of equal shape.
        dataset_fn: Returns the tokens of one file as integers; by default, its bytes.
        cache: Has no effect: tokens are always kept in memory.
        random_skip: For training: each pass starts at a random one of the first tokens.
        feature_fn: Converts a sequence to the model's input.
        interleave: See `rec_data`.

    Raises:
        ValueError: If both `allow_remainder` and `random_skip` are set.

    >>> fn = lm_data(3, dataset_fn=lambda name: range(8), feature_fn=lambda ids: ids.tolist())
    >>> [ids.tolist() for ids in fn(['a'])]
    [[0, 1, 2], [3, 4, 5]]
    """
    del cache
    if allow_remainder and random_skip:
        raise ValueError(
            "allow_remainder=True and random_skip=True exclude each other: random_skip drops the "
            "incomplete sequences that allow_remainder keeps."
        )

    def open_one(name: str) -> Source:
        stream = _read_tokens(name, dataset_fn)
        reader = TokenReader(stream, seq_length, f"tokens of {name}", random_skip=random_skip)
        drops_remainder = not allow_remainder and not random_skip
        return Source(reader).take(len(stream) // seq_length if drops_remainder else -1)

    def features(example: Any) -> Any:
        ids = example["tokens"][: int(example["token_mask"].sum())]
        return ids if feature_fn is None else feature_fn(ids)

    return DataFn(lambda names: join([open_one(name) for name in names], interleave), features)


def _read_tokens(name: str, dataset_fn: Callable[[str], Any] | None) -> np.ndarray:
    if dataset_fn is None:
        return np.frombuffer(files.read_bytes(name), np.uint8).astype(np.int32)
    tokens = dataset_fn(name)
    if hasattr(tokens, "as_numpy_iterator"):
        tokens = tokens.as_numpy_iterator()
    if not isinstance(tokens, np.ndarray):
        tokens = np.fromiter(tokens, np.int64)
    return tokens.astype(np.int32)


def lines_iterator(
    path: str | Path, encoding: str = "utf-8", split: bool = False, allow_empty: bool = False
) -> Iterator[Any]:
    """Yields the lines of a text file without newlines, skipping those that cannot be decoded.

    Args:
        path: The file; may end in .gz.
        encoding: Encoding of the text.
        split: If true, each line is split into a list of words.
        allow_empty: If true, empty lines are included.
    """
    for line in files.read_bytes(str(path)).splitlines():
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError:
            continue
        result = text.split() if split else text
        if result or allow_empty:
            yield result


def join(sources: Sequence[Source], interleave: bool) -> Source:
    """Combines several sources into one, one after the other or interleaved."""
    if len(sources) == 1:
        return sources[0]
    return Source(Concatenated([source.reader for source in sources], interleave=interleave))
