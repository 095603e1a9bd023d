"""Data functions: the form in which a model file names its data to the estimator."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tekoa.data import foreign, patterns
from tekoa.data.source import Source


@dataclasses.dataclass(frozen=True)
class DataFn:
    """Opens one shard of some files: `fn(filenames, shard_num, shard_index, epochs, num_take)`.

    Attributes:
        open_fn: Gives data of the file names, in any form that `as_source` takes.
        feature_fn: Makes what the model gets of each example.

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
            filenames: A pattern, or what `tekoa.data.filenames` made of one.
            shard_num: How many shards there are.
            shard_index: Which one to give: every `shard_num`-th example from here on.
            epochs: How many passes `batches(epochs=1)` makes; None goes on for ever.
            num_take: How many examples to take, before sharding; -1 takes all.
        """
        source = foreign.as_source(self.open_fn(filenames))
        source = source.take(num_take).shard(shard_index, shard_num).repeat(epochs)
        return source if self.feature_fn is None else source.map(self.feature_fn)
