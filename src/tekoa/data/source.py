"""`Source`: examples by number, mapped, cut, and handed out in batches."""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tekoa.data import reader as readers
from tekoa.data import stacking, wrappers
from tekoa.data.batches import Batches
from tekoa.data.order import Plan, Remainder, Shuffle


class Source:
    """Data that can be looked at, mapped and batched; made by `load` and `as_source`.

    Methods give a new source and leave this one as it is.

    >>> from tekoa import data
    >>> source = data.load('digits://split=test')
    >>> len(source), source.info.shapes, source.info.n_classes
    (360, {'image': (8, 8, 1), 'label': ()}, 10)
    >>> next(source.batches(32, seed=1, shuffle=True))['image'].shape
    (32, 8, 8, 1)
    """

    def __init__(self, reader: readers.Reader, *, epochs: int | None = 1):
        self._reader, self._epochs = reader, epochs

    @functools.cached_property
    def info(self) -> readers.Info:
        """Shapes, dtypes, number of classes and value range, where known."""
        return self._reader.info

    def __repr__(self) -> str:
        return f"<Source {self._reader.name}>"

    def __len__(self) -> int:
        return readers.length(self._reader)

    def __getitem__(self, at: int) -> Any:
        at = at + len(self) if at < 0 else at
        if at < 0 or self._reader.reach(at + 1) <= at:
            raise IndexError(f"{self._reader.name} has {len(self)} examples; {at} is not one.")
        return stacking.row(self._reader.gather(readers.Draw.of_rows([at])), 0)

    def __iter__(self) -> Iterator[Any]:
        """Gives the examples of one epoch, in the order of the source."""
        for batch in Batches(self._reader, Plan(batch_size=1, epochs=1)):
            yield stacking.row(batch, 0)

    def map(self, fn: Callable[[Any], Any]) -> "Source":
        """Applies `fn(example)` to each example, when it is read."""
        return self._mapped(wrappers.OnExample(fn), 1)

    def map_with_rng(self, fn: Callable[[Any, np.random.Generator], Any]) -> "Source":
        """Applies `fn(example, rng)`; the generator depends on seed, epoch and row only.

        So an augmentation is the same after a restart, on any number of shards.
        """
        return self._mapped(wrappers.OnExampleWithRng(fn), 1)

    def map_batch(self, fn: Callable[[Any], Any]) -> "Source":
        """Applies `fn(batch)` to many examples at once, stacked along the first axis.

        Each row of the result must depend on the same row of the batch only, since how many
        rows come together is not fixed.
        """
        return self._mapped(wrappers.OnBatch(fn), self._reader.block_rows)

    def _mapped(self, transform: Callable[[Any, Any], Any], block_rows: int) -> "Source":
        return Source(wrappers.Mapped(self._reader, transform, block_rows), epochs=self._epochs)

    def take(self, n: int) -> "Source":
        """Keeps the first `n` examples; -1 keeps all."""
        return self if n < 0 else Source(wrappers.part(self._reader, limit=n), epochs=self._epochs)

    def shard(self, index: int, count: int) -> "Source":
        """Keeps every `count`-th example from number `index` on.

        For data functions that are asked for a shard. Batches have a `shard` of their own,
        which does not change what a batch holds.
        """
        if not 0 <= index < count:
            raise ValueError(f"shard needs 0 <= index < count, got {index} of {count}.")
        if count == 1:
            return self
        return Source(wrappers.part(self._reader, start=index, step=count), epochs=self._epochs)

    def repeat(self, epochs: int | None) -> "Source":
        """Makes `epochs` passes count as one for `batches`; None repeats for ever."""
        return Source(self._reader, epochs=_times(self._epochs, epochs))

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = None,
        epochs: int | None = None,
        consecutive: int | None = None,
        remainder: Remainder = "drop",
        shard: tuple[int, int] = (0, 1),
        take: int = -1,
        workers: int = 0,
    ) -> Batches:
        """Gives an iterator of batches, with `state()` and `restore(state)`.

        Batch i depends on the source, these options and i, and on nothing else. Batches span
        epoch borders; only the very last one can be short.

        Args:
            batch_size: Rows of a batch over all shards together.
            seed: Selects the order of a shuffle.
            shuffle: None keeps the order of the source. True shuffles each epoch as a whole.
                A number does the same where rows have random access and their number is known;
                where they are read from text or a stream, it shuffles within so many rows.
            epochs: How many passes to make; None goes on for ever.
            consecutive: Row j of batch i+1 is the example after row j of batch i, in runs of so
                many batches; the runs are what is shuffled.
            remainder: What becomes of a last batch that is not full. 'drop' leaves it out, 'pad'
                repeats its last example and adds a boolean field `mask`, 'keep' gives it short.
                Boolean fields named `*_mask` are False in the repeated examples.
            shard: (index, count): hand out only this contiguous part of every batch.
            take: Use only the first `take` examples; -1 uses all.
            workers: Processes that read and map ahead. Worth it for costly map functions only.

        Raises:
            ValueError: If options do not fit together.
            DataError: If there is no batch to give.
        """
        plan = Plan(
            batch_size=operator.index(batch_size),
            seed=operator.index(seed),
            shuffle=shuffle,
            epochs=_times(self._epochs, epochs),
            consecutive=consecutive,
            remainder=remainder,
            shard=shard,
        )
        return Batches(self.take(take)._reader, plan, n_workers=workers)


def _times(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b
