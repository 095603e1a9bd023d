"""`Source`: examples by number, with methods to map, select and batch them."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tekoa.data.batching import buckets, packing, permutation, stacking
from tekoa.data.batching.batches import Batches
from tekoa.data.batching.order import BatchPlan, MakeOrder, Order, Remainder, Shuffle
from tekoa.data.batching.schedule import Numbers
from tekoa.data.readers import base as readers
from tekoa.data.readers import views


class Source:
    """Data that can be inspected, mapped and batched; created by `load` and `as_source`.

    Methods return a new source and leave this one unchanged.

    >>> from tekoa import data
    >>> source = data.load('digits://split=test')
    >>> len(source), source.info.shapes, source.info.n_classes
    (360, {'image': (8, 8, 1), 'label': ()}, 10)
    >>> next(source.batches(32, seed=1, shuffle=True))['image'].shape
    (32, 8, 8, 1)
    """

    def __init__(self, reader: readers.Reader, *, epochs: int | None = 1, order: MakeOrder = Order):
        self._reader, self._epochs, self._order = reader, epochs, order

    @property
    def reader(self) -> readers.Reader:
        """The reader of the examples."""
        return self._reader

    @functools.cached_property
    def info(self) -> readers.Info:
        """Shapes and dtypes, and the number of classes and value range if known."""
        return self._reader.info

    def __repr__(self) -> str:
        return f"<Source {self._reader.name}>"

    def __len__(self) -> int:
        return readers.length(self._reader)

    def __getitem__(self, at: int) -> Any:
        at = at + len(self) if at < 0 else at
        if at < 0 or self._reader.reach(at + 1) <= at:
            raise IndexError(f"{self._reader.name} has {len(self)} examples, but no number {at}.")
        return stacking.row(self._reader.gather(readers.RowRequest.of_rows([at])), 0)

    def __iter__(self) -> Iterator[Any]:
        """Yields the examples of one epoch, in the order of the source."""
        for batch in Batches(self._reader, BatchPlan(batch_size=1, epochs=1)):
            yield stacking.row(batch, 0)

    def map(self, fn: Callable[[Any], Any]) -> "Source":
        """Returns a source that applies `fn(example)` to each example when it is read."""
        return self._map(views.apply_to_examples, fn, 1)

    def map_with_rng(self, fn: Callable[[Any, np.random.Generator], Any]) -> "Source":
        """Returns a source that applies `fn(example, rng)` to each example.

        The generator depends on seed, epoch and row only, so an augmentation is the same after
        a restart and on any number of shards. It is valid until `fn` returns.
        """
        return self._map(views.apply_with_rng, fn, 1)

    def map_batch(self, fn: Callable[[Any], Any]) -> "Source":
        """Returns a source that applies `fn(batch)` to several stacked examples at once.

        Each row of the result must depend only on the same row of the batch, because the
        number of rows per call is not fixed.
        """
        return self._map(views.apply_to_batch, fn, self._reader.block_rows)

    def _map(self, apply: Callable[..., Any], fn: Callable[..., Any], block_rows: int) -> "Source":
        mapped = views.Mapped(self._reader, functools.partial(apply, fn), block_rows)
        return Source(mapped, epochs=self._epochs, order=self._order)

    def with_classes(self, classes: Sequence[str], *, unknown: int | None = None) -> "Source":
        """Returns a source with labels that are numbered by another list of classes.

        For data whose `info.facts` names its classes, such as images in folders: validation
        data may lack a class of the training data, or be numbered in another order.

        Args:
            classes: The names of the classes, such as those of the training data.
            unknown: The label of classes that are not in the list; by default they are an error.

        Raises:
            DataError: If the data has a class that is not in the list.

        >>> from tekoa import data
        >>> source = data.load('digits://split=test').with_classes([str(i) for i in range(12)])
        >>> source.info.n_classes
        12
        """
        mapped = views.with_classes(self._reader, classes, unknown=unknown)
        return Source(mapped, epochs=self._epochs, order=self._order)

    def take(self, n: int) -> "Source":
        """Returns a source of the first `n` examples; -1 keeps all."""
        if n < 0:
            return self
        return Source(views.part(self.rows_for("take"), limit=n), epochs=self._epochs)

    def shard(self, index: int, count: int) -> "Source":
        """Returns a source of every `count`-th example, starting at `index`.

        For data functions that must return a shard. `batches` has its own `shard` option,
        which splits each batch without changing its examples.
        """
        if not 0 <= index < count:
            raise ValueError(f"shard needs 0 <= index < count, got {index} of {count}.")
        if count == 1:
            return self
        rows = views.part(self.rows_for("shard"), start=index, step=count)
        return Source(rows, epochs=self._epochs)

    def divide(self, fraction: float, *, seed: int = 0) -> tuple["Source", "Source"]:
        """Divides the examples at random into two sources, such as training and validation.

        Args:
            fraction: The share of the second source, between 0 and 1.
            seed: Selects the examples; the same seed divides the same data in the same way.

        Raises:
            DataError: If the data is a stream, or one of the parts would be empty.

        >>> from tekoa import data
        >>> train, valid = data.as_source({'x': np.arange(10)}).divide(0.2)
        >>> len(train), len(valid)
        (8, 2)
        """
        if self._reader.is_stream:
            raise readers.DataError(f"{self._reader.name} is a stream and cannot be divided.")
        reader, n = self.rows_for("divide"), len(self)
        n_second = round(n * fraction)
        if not 0 < n_second < n:
            raise readers.DataError(
                f"{fraction} of {n} examples leaves nothing in one of the parts."
            )
        order = permutation.permute(np.arange(n), n, (seed, n))
        parts = np.sort(order[n_second:]), np.sort(order[:n_second])
        first, second = (
            Source(views.Selected(reader, rows, f"part {i} of {fraction} by seed {seed}"))
            for i, rows in enumerate(parts)
        )
        return first.repeat(self._epochs), second.repeat(self._epochs)

    def pack(
        self,
        length: int,
        *,
        fields: Sequence[str] = ("tokens",),
        lengths: Sequence[int] | np.ndarray | None = None,
    ) -> "Source":
        """Returns a source of rows of `length` tokens, each filled with several examples.

        A row has the `fields`, `segments` (1, 2, ... for its documents, 0 for padding),
        `positions` (from 0 in each document) and `token_mask` (False for padding). Which
        documents share a row depends only on their lengths. Longer documents are cut into
        pieces. `info.facts["padding"]` is the share of padding.

        Args:
            length: Tokens in a row.
            fields: Fields to pack, of the same length in each example; others are dropped.
            lengths: The length of each example, if known; otherwise all examples are read.

        Raises:
            DataError: If the data is a stream, or the examples have no such fields.

        >>> from tekoa import data
        >>> rows = data.as_source([{'tokens': [1, 2, 3]}, {'tokens': [4]}, {'tokens': [5, 6]}])
        >>> {name: value.tolist() for name, value in rows.pack(5)[0].items()}
        {'tokens': [1, 2, 3, 5, 6], 'segments': [1, 1, 1, 2, 2],
         'positions': [0, 1, 2, 0, 1], 'token_mask': [True, True, True, True, True]}
        """
        if operator.index(length) < 1 or not fields:
            raise ValueError(f"pack needs a length of at least 1 and fields, got {length}.")
        packed = packing.PackedReader(self.rows_for("pack"), length, fields, lengths)
        return Source(packed, epochs=self._epochs)

    def bucket(
        self,
        limits: Sequence[int],
        *,
        fields: Sequence[str] = ("tokens",),
        lengths: Sequence[int] | np.ndarray | None = None,
    ) -> "Source":
        """Returns a source whose batches have examples of similar length, padded to a limit.

        Each batch is padded with zeros to the smallest of the `limits` that its examples need,
        so there are as many shapes, and compilations, as limits. `token_mask` is False for
        padding.

        Args:
            limits: Lengths to pad to, increasing.
            fields: Fields to pad, of the same length in each example.
            lengths: The length of each example, if known; otherwise all examples are read.

        Raises:
            DataError: If the data is a stream, or an example is longer than the last limit.

        >>> from tekoa import data
        >>> texts = data.as_source([{'tokens': [1]}, {'tokens': [2, 3, 4]}, {'tokens': [5, 6]}])
        >>> [batch['tokens'].tolist() for batch in texts.bucket([2, 4]).batches(
        ...     2, epochs=1, remainder='keep')]
        [[[1, 0], [5, 6]], [[2, 3, 4, 0]]]
        """
        ordered = sorted({operator.index(limit) for limit in limits})
        if not ordered or ordered[0] < 1 or ordered != list(limits) or not fields:
            raise ValueError(
                f"bucket needs increasing limits of at least 1, and fields; got {list(limits)} and "
                f"{list(fields)}."
            )
        padded = buckets.PaddedReader(self.rows_for("bucket"), ordered, fields, lengths)
        order = buckets.Buckets(padded.bucket_of_row, tuple(ordered))
        return Source(padded, epochs=self._epochs, order=order)

    def repeat(self, epochs: int | None) -> "Source":
        """Returns a source of which one epoch is `epochs` passes; None repeats forever."""
        return Source(self._reader, epochs=_multiply(self._epochs, epochs), order=self._order)

    def rows_for(self, purpose: str) -> readers.Reader:
        """Returns the reader, for a method that chooses or combines rows.

        Raises:
            DataError: If the source has an order of its own, as a mixture has.
        """
        if self._order is not Order:
            raise readers.DataError(
                f"{self._reader.name} is a mixture or has length buckets, and {purpose} would lose "
                f"its order. Use {purpose} on the sources before they are mixed or bucketed."
            )
        return self._reader

    def batches(
        self,
        batch_size: Numbers,
        *,
        length: Numbers | None = None,
        seed: int = 0,
        shuffle: Shuffle = None,
        epochs: int | None = None,
        consecutive: int | None = None,
        remainder: Remainder = "drop",
        shard: tuple[int, int] = (0, 1),
        take: int = -1,
        workers: int = 0,
    ) -> Batches:
        """Returns an iterator over batches, with `state()`, `restore(state)` and `seek(i)`.

        Batch i depends only on the source, these options and i. Batches span epoch boundaries;
        only the very last one can be short.

        Args:
            batch_size: Number of rows of a batch, over all shards; or by number of the first batch
                to which it applies: {0: 32, 1000: 64}. A loop uses one batch per step.
            length: Cuts sequences into pieces of this length, which become rows; also by number of
                the batch. It must divide the second axis of the fields, of which there must be one
                length. Fields with one axis are repeated for each piece.
            seed: Selects the order of a shuffle.
            shuffle: None keeps the order of the source. True shuffles each complete epoch. A
                number does the same for data with random access and known length; text files
                and streams are shuffled within windows of that many rows.
            epochs: Number of passes over the data; None repeats forever.
            consecutive: Row j of batch i+1 is the example after row j of batch i, in groups of
                this many batches; the groups are shuffled.
            remainder: What to do with an incomplete last batch: 'drop' it, 'pad' it with copies
                of its last example and add a boolean field `mask`, or 'keep' it short. When
                padding, boolean fields named `*_mask` are False in the copies.
            shard: (index, count): return only this contiguous part of each batch.
            take: Use only the first `take` examples; -1 uses all.
            workers: Number of processes that read and map ahead. Useful only for slow map
                functions.

        Raises:
            ValueError: If the options contradict one another.
            DataError: If there are too few examples for a batch.
        """
        plan = BatchPlan(
            batch_size=batch_size,
            length=length,
            seed=operator.index(seed),
            shuffle=shuffle,
            epochs=_multiply(self._epochs, epochs),
            consecutive=consecutive,
            remainder=remainder,
            shard=shard,
        )
        source = self.take(take)
        return Batches(source.reader, plan, n_workers=workers, make_order=source._order)


def _multiply(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b
