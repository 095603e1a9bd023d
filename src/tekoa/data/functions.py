"""Data functions: the form in which a model file names its data to the estimator."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tekoa.data import foreign, patterns
from tekoa.data.source import Source


class DataFn(Protocol):
    """Opens one shard of some files, for a number of epochs."""

    def __call__(
        self,
        filenames: str | Sequence[str],
        shard_num: int = 1,
        shard_index: int = 0,
        epochs: int | None = 1,
        num_take: int = -1,
    ) -> Source:
        """Gives the examples."""
        ...


def make_data_fn(
    open_fn: Callable[[Any], Any] = patterns.load, feature_fn: Callable[[Any], Any] | None = None
) -> DataFn:
    """Makes a data function: `fn(filenames, shard_num, shard_index, epochs, num_take)`.

    Args:
        open_fn: Gives data of the file names, in any form that `as_source` takes.
        feature_fn: Makes what the model gets of each example.

    Returns:
        A function that gives the first `num_take` examples (-1: all), of these every
        `shard_num`-th from `shard_index` on, in `epochs` passes (None: for ever).

    >>> fn = make_data_fn(feature_fn=lambda example: {'label': example['label']})
    >>> len(fn(['digits://split=test'], shard_num=2))
    180
    """

    def data_fn(
        filenames: str | Sequence[str],
        shard_num: int = 1,
        shard_index: int = 0,
        epochs: int | None = 1,
        num_take: int = -1,
    ) -> Source:
        source = foreign.as_source(open_fn(filenames))
        source = source.take(num_take).shard(shard_index, shard_num).repeat(epochs)
        return source if feature_fn is None else source.map(feature_fn)

    return data_fn
