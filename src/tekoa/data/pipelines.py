"""Data functions made of a function that opens one file, as JEstimator's model files have them.

Sharding takes every n-th example, whatever the files; batches are shuffled, repeated and
split over processes by the loop, so that a position can be saved.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import files, foreign, patterns
from tekoa.data.functions import DataFn
from tekoa.data.language import TokenReader
from tekoa.data.reader import Draw, Info, RandomAccess, length
from tekoa.data.source import Source
from tekoa.data.wrappers import Concatenated


def rec_data(
    dataset_fn: Callable[[str], Any] = patterns.load,
    cache: bool = False,
    feature_fn: Callable[[Any], Any] | None = None,
    interleave: bool = False,
) -> DataFn:
    """Makes a data function of files whose records are examples.

    Args:
        dataset_fn: Opens one file, or one pattern such as `tfds://NAME/split=train`; gives data
            in any form that `as_source` takes.
        cache: If true, all examples are read into memory, once. Several files that can only be
            read forwards need it.
        feature_fn: Makes what the model gets of each example.
        interleave: If true, the files' examples come in turns: the first of each, then the
            second of each.

    >>> fn = rec_data(lambda name: [{'file': name, 'row': i} for i in range(2)], interleave=True)
    >>> [str(example['file']) for example in fn(['a', 'b'])]
    ['a', 'b', 'a', 'b']
    """

    def open_one(name: str) -> Source:
        source = foreign.as_source(dataset_fn(name))
        return foreign.as_source(list(source)) if cache else source

    return DataFn(lambda names: joined([open_one(name) for name in names], interleave), feature_fn)


def lm_data(
    seq_length: int,
    allow_remainder: bool = False,
    dataset_fn: Callable[[str], Any] | None = None,
    cache: bool = False,
    random_skip: bool = False,
    feature_fn: Callable[[Any], Any] | None = None,
    interleave: bool = False,
) -> DataFn:
    """Makes a data function of files of tokens, cut into sequences.

    Args:
        seq_length: Tokens in an example.
        allow_remainder: If true, the last sequence of each file may be shorter; `feature_fn`
            must then make all examples of one shape.
        dataset_fn: Gives the tokens of one file, as whole numbers; its bytes by default.
        cache: Has no effect: the tokens are kept in memory, once read.
        random_skip: For training: each pass starts at another of the first tokens.
        feature_fn: Makes what the model gets of a sequence.
        interleave: As `rec_data` takes it.

    Raises:
        ValueError: If both `allow_remainder` and `random_skip` are set.

    >>> fn = lm_data(3, dataset_fn=lambda name: range(8), feature_fn=lambda ids: ids.tolist())
    >>> [ids.tolist() for ids in fn(['a'])]
    [[0, 1, 2], [3, 4, 5]]
    """
    del cache
    if allow_remainder and random_skip:
        raise ValueError("random_skip leaves the ends of the text out: allow_remainder has none.")

    def open_one(name: str) -> Source:
        stream = _tokens(name, dataset_fn)
        what = f"tokens of {name}"
        source = Source(TokenReader(stream, seq_length, what, random_skip=random_skip))
        if not allow_remainder and not random_skip:
            source = source.take(len(stream) // seq_length)
        return source

    def sequence(example: Any) -> Any:
        ids = example["tokens"][: int(example["token_mask"].sum())]
        return ids if feature_fn is None else feature_fn(ids)

    return DataFn(lambda names: joined([open_one(name) for name in names], interleave), sequence)


def _tokens(name: str, dataset_fn: Callable[[str], Any] | None) -> np.ndarray:
    if dataset_fn is None:
        return np.frombuffer(files.read_bytes(name), np.uint8).astype(np.int32)
    given = dataset_fn(name)
    if hasattr(given, "as_numpy_iterator"):
        given = given.as_numpy_iterator()
    if not isinstance(given, np.ndarray):
        given = np.fromiter(given, np.int64)
    return given.astype(np.int32)


def lines_iterator(
    path: str | Path, encoding: str = "utf-8", split: bool = False, allow_empty: bool = False
) -> Iterator[Any]:
    """Gives the lines of a text file, without their ends; those that cannot be read are left out.

    Args:
        path: The file, maybe ending in .gz.
        encoding: How it is written.
        split: If true, each line is a list of its words.
        allow_empty: If true, empty lines are given too.
    """
    for line in files.read_bytes(str(path)).splitlines():
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError:
            continue
        found = text.split() if split else text
        if found or allow_empty:
            yield found


def joined(sources: Sequence[Source], interleave: bool) -> Source:
    """Gives several sources as one, one after the other or in turns."""
    readers = [source._reader for source in sources]
    if len(readers) == 1:
        return sources[0]
    if not interleave:
        return Source(Concatenated(readers))
    return Source(InTurns(Concatenated(readers), [length(reader) for reader in readers]))


class InTurns(RandomAccess):
    """The rows of several parts, the first of each before the second of each.

    Args:
        base: The parts, one after the other.
        sizes: Their lengths.
    """

    def __init__(self, base: Concatenated, sizes: Sequence[int]):
        self._base = base
        self._order = np.argsort(np.concatenate([np.arange(n) for n in sizes]), kind="stable")
        self.block_rows = base.block_rows
        self.name = f"in turns {base.name}"

    def __len__(self) -> int:
        return len(self._order)

    @property
    def info(self) -> Info:
        """The base's facts."""
        return self._base.info

    def gather(self, draw: Draw) -> Any:
        """Gives the base's rows that these rows stand for."""
        return self._base.gather(draw._replace(rows=self._order[draw.rows]))
