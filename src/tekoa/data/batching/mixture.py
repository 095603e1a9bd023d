"""The order of a mixture: which source provides each example, and which of its rows.

A mixture is a sequence of slots. Of the first T slots, the first source has `T * w // 1`, the
second the same share of what is left, and so on: integer arithmetic that gives the source of any
slot, and how many slots of that source precede it, without looking at the others. A shuffle
permutes the sources of the slots within windows. Each source is walked by itself, epoch after
epoch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tekoa.data.batching import permutation
from tekoa.data.batching.order import BatchPlan, BatchRows, count_batches
from tekoa.data.readers.base import DataError, Reader, RowRequest

# Weights are multiples of 1 / _UNITS, whose square must fit into 63 bits.
_UNITS = 2**30
# Sources change places within windows of this size, which end with the epoch.
_WINDOW = 1024
# Separates the shuffle of the slots from that of the sources.
_SLOTS = 0x517


def shares(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Converts weights to whole numbers that add up to 2^30, by largest remainders.

    Raises:
        ValueError: If a weight is not a positive number, or below a billionth of their sum.

    >>> shares({'a': 3, 'b': 1})
    (805306368, 268435456)
    """
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"The weight of {name!r} must be a positive number, got {weight!r}.")
    total = math.fsum(weights.values())
    exact = [weight / total * _UNITS for weight in weights.values()]
    units = [int(value) for value in exact]
    by_remainder = sorted(range(len(units)), key=lambda at: units[at] - exact[at])
    for at in by_remainder[: _UNITS - sum(units)]:
        units[at] += 1
    if small := [name for name, n in zip(weights, units) if n == 0]:
        raise ValueError(f"The weights of {small} are below a billionth of their sum. Remove them.")
    return tuple(units)


def shares_of_sizes(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns shares by which an epoch has each example once; nearly so above 2^30 examples."""
    return tuple(sizes.values()) if sum(sizes.values()) <= _UNITS else shares(sizes)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Creates the order of a mixture; the reader has the rows of all sources, one after another.

    Attributes:
        names: Names of the sources.
        sizes: Number of examples of each.
        units: Share of each, as whole numbers.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    units: tuple[int, ...]

    def __call__(self, reader: Reader, plan: BatchPlan, /) -> "MixtureOrder":
        return MixtureOrder(self, reader, plan)


class MixtureOrder:
    """The order of a mixture under a plan; see `BatchOrder`."""

    has_one_shape = True

    def __init__(self, mixture: Mixture, reader: Reader, plan: BatchPlan):
        if plan.consecutive:
            raise DataError(
                f"{reader.name} is a mixture, of which neighbouring examples come from different "
                "sources, so it has no consecutive batches."
            )
        self._mixture, self._plan, self._name = mixture, plan, reader.name
        self._sizes = np.array(mixture.sizes, np.int64)
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._epoch_slots = sum(mixture.sizes)
        self._n_slots = None if plan.epochs is None else plan.epochs * self._epoch_slots
        self._last_window = -1, np.zeros((2, 0), np.int64)

    @property
    def kind(self) -> str:
        mixture = self._mixture
        total = sum(mixture.units)
        percents = [f"{name} {n / total:.4%}" for name, n in zip(mixture.names, mixture.units)]
        return f"mixed {', '.join(percents)}; {'permuted' if self._plan.shuffle else 'in order'}"

    def n_batches(self) -> int | None:
        if self._n_slots is None:
            return None
        return count_batches(self._n_slots, self._plan, self._name)

    def floor(self, batch: int) -> tuple[int, int]:
        """Returns the start: all rows can be read directly."""
        return 0, 0

    def rows(self, first: int, n_batches: int) -> BatchRows:
        if (n_all := self.n_batches()) is not None:
            n_batches = max(0, min(n_batches, n_all - first))
        sizes = self._plan.sizes
        n_batches = min(n_batches, sizes.n_same(first))
        starts = sizes.total(first) + np.arange(n_batches)[:, None] * sizes.at(first)
        at, is_real = starts + self._plan.local_rows(first), None
        if self._n_slots is not None:
            is_real = at < self._n_slots
            at = np.minimum(at, self._n_slots - 1)
        sources, numbers = self._assigned(at.ravel())
        epochs, rows = np.divmod(numbers, self._sizes[sources])
        if self._plan.shuffle:
            rows = self._shuffle(rows, epochs, sources)
        request = RowRequest(rows + self._offsets[sources], epochs, seed=self._plan.seed)
        return BatchRows(request=request, first=first, n_batches=n_batches, is_real=is_real)

    def examples_per_source(self, batch: int) -> dict[str, int]:
        end = self._plan.sizes.total(batch)
        if self._n_slots is not None:
            end = min(end, self._n_slots)
        epoch, at = divmod(end, self._epoch_slots)
        start = epoch * self._epoch_slots + at // _WINDOW * _WINDOW
        counts = _counts(start, self._mixture.units)
        counts += np.bincount(self._window(start)[0, : end - start], minlength=len(counts))
        return dict(zip(self._mixture.names, counts.tolist(), strict=True))

    def _assigned(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each position of the run, and the number of the example in it."""
        starts = at - at % self._epoch_slots % _WINDOW
        sources, numbers = np.empty_like(at), np.empty_like(at)
        for start in np.unique(starts).tolist():
            is_here = starts == start
            sources[is_here], numbers[is_here] = self._window(start)[:, at[is_here] - start]
        return sources, numbers

    def _window(self, start: int) -> np.ndarray:
        """Returns sources and numbers of all positions of a window; keeps the last window."""
        if self._last_window[0] == start:
            return self._last_window[1]
        n, units = min(_WINDOW, self._epoch_slots - start % self._epoch_slots), self._mixture.units
        sources, numbers = _assign(np.arange(start, start + n), units)
        if self._plan.shuffle:
            key = (self._plan.seed, start, _SLOTS)
            sources = sources[permutation.permute(np.arange(n), n, key)]
            # Only the sources change places: the examples of each keep their order.
            first, counts = _counts(start, units), np.bincount(sources, minlength=len(units))
            walks = [np.arange(a, a + count) for a, count in zip(first, counts.tolist())]
            numbers[np.argsort(sources, kind="stable")] = np.concatenate(walks)
        self._last_window = start, np.stack([sources, numbers])
        return self._last_window[1]

    def _shuffle(self, rows: np.ndarray, epochs: np.ndarray, sources: np.ndarray) -> np.ndarray:
        """Permutes each epoch of each source."""
        shuffled = np.empty_like(rows)
        pairs = np.unique(np.stack([epochs, sources]), axis=1).T.tolist()
        for epoch, source in pairs:
            is_here = (epochs == epoch) & (sources == source)
            key = (self._plan.seed, epoch, source)
            shuffled[is_here] = permutation.permute(rows[is_here], self._mixture.sizes[source], key)
        return shuffled


def _assign(slots: np.ndarray, units: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each slot, and how many of its slots come before it."""
    n_left = sum(units)
    # After as many slots as there are units, everything repeats.
    rounds, before = np.divmod(slots, n_left)
    sources, numbers, after = np.zeros_like(slots), np.zeros_like(slots), before + 1
    for source, n in enumerate(units):
        n_before, n_after = before * n // n_left, after * n // n_left
        is_here = n_after > n_before
        sources[is_here], numbers[is_here] = source, (n_before + rounds * n)[is_here]
        # The other sources share what this one leaves.
        before, after, n_left = before - n_before, after - n_after, n_left - n
    return sources, numbers


def _counts(n_slots: int, units: Sequence[int]) -> np.ndarray:
    """Returns how many of the first slots each source has."""
    counts, left, n_left = [], n_slots, sum(units)
    for n in units:
        counts.append(left * n // n_left)
        left, n_left = left - counts[-1], n_left - n
    return np.array(counts, np.int64)
