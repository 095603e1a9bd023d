"""Which rows make up batch i: a pure function of the plan, the length and i.

Positions run through all epochs, so batches span epoch borders and only the end of the
last epoch can leave a remainder. With `consecutive=n` the things that are ordered are
groups of n neighbouring rows instead of rows: batch i takes from each of its groups the
element `i mod n`, so that row j of the next batch goes on where row j of this one ends.

A shard takes a contiguous part of every batch: the shards' batches, concatenated, are
the global batch, whatever their number.
"""

import dataclasses
import sys
from typing import Literal, NamedTuple

import numpy as np

from tekoa.data import permutation
from tekoa.data.reader import DataError, Draw, Reader

Remainder = Literal["drop", "pad", "keep"]
Shuffle = bool | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How the rows of a source are ordered and cut into batches; see `Source.batches`."""

    batch_size: int
    seed: int = 0
    shuffle: Shuffle = None
    epochs: int | None = None
    consecutive: int | None = None
    remainder: Remainder = "drop"
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self):
        for name in ("batch_size", "epochs", "consecutive"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.shuffle is not None and not isinstance(self.shuffle, bool) and self.shuffle < 1:
            raise ValueError(f"shuffle must be None, True or at least 1, got {self.shuffle}.")
        if self.remainder not in ("drop", "pad", "keep"):
            raise ValueError(f"remainder must be 'drop', 'pad' or 'keep', got {self.remainder!r}.")
        if self.remainder == "keep" and self.consecutive:
            raise ValueError(
                "remainder='keep' would shift the rows of consecutive batches. Use 'pad' or 'drop'."
            )
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"shard must be (index, count) with 0 <= index < count: {self.shard}.")
        if self.batch_size % count:
            raise ValueError(
                f"batch_size {self.batch_size} is for all shards together and must be a multiple "
                f"of their number, {count}."
            )


class BatchRows(NamedTuple):
    """Rows of a few batches in a row, as one shard sees them.

    Attributes:
        draw: What to ask of the reader: (number of batches x rows per batch), flattened.
        first: Number of the first batch.
        n_batches: How many batches these are; 0 past the end.
        is_real: False where a row only fills the batch up; None if all rows are real.
    """

    draw: Draw
    first: int
    n_batches: int
    is_real: np.ndarray | None

    def part(self, first: int, n_batches: int) -> "BatchRows":
        """Takes the rows of some of the batches, as many as there are."""
        n_local = len(self.draw.rows) // self.n_batches
        start = first - self.first
        n_batches = min(n_batches, self.n_batches - start)
        flat = slice(start * n_local, (start + n_batches) * n_local)
        return BatchRows(
            self.draw._replace(rows=self.draw.rows[flat], epochs=self.draw.epochs[flat]),
            first,
            n_batches,
            None if self.is_real is None else self.is_real[start : start + n_batches],
        )


class Order:
    """The order in which a reader's rows are batched under a plan."""

    def __init__(self, reader: Reader, plan: Plan):
        self._reader, self._plan = reader, plan
        self._group = plan.consecutive or 1
        n_local = plan.batch_size // plan.shard[1]
        self._local = np.arange(n_local) + plan.shard[0] * n_local
        self._window = self._shuffle_window()

    @property
    def kind(self) -> str:
        """How rows are shuffled, in a word; part of a position's fingerprint."""
        if not self._plan.shuffle:
            return "in order"
        return f"within {self._window}" if self._window else "permuted"

    def _shuffle_window(self) -> int | None:
        shuffle = self._plan.shuffle
        if self._reader.is_stream and shuffle is True:
            raise DataError(
                f"{self._reader.name} can only be read forwards, so it has no full shuffle. "
                "Give a buffer size, such as shuffle=10000."
            )
        # With random access a full permutation costs no more than a buffer, and mixes better.
        is_windowed = self._reader.is_lazy and shuffle and shuffle is not True
        return int(shuffle) if is_windowed and shuffle else None

    def n_batches(self) -> int | None:
        """Counts the batches of the run, or gives None if it never ends.

        Raises:
            DataError: If there is no batch at all.
        """
        # A run without end needs to know only that there is something to read.
        n_groups = 1 if self._plan.epochs is None else sys.maxsize // self._group
        return self._count(self._reach_groups(n_groups))

    def rows(self, first: int, n_batches: int) -> BatchRows:
        """Finds the rows of `n_batches` batches, or fewer at the end.

        Args:
            first: Number of the first batch, from 0.
            n_batches: How many batches are wanted.
        """
        size = self._plan.batch_size
        end = ((first + n_batches - 1) // self._group + 1) * size
        n = self._reach_groups(end)
        is_read = n < end  # Then `n` is the number of groups in an epoch.
        if is_read and (n_all := self._count(n)) is not None:
            n_batches = max(0, min(n_batches, n_all - first))
        batches = np.arange(first, first + n_batches)[:, None]
        at = batches // self._group * size + self._local
        is_real = None
        if is_read and self._plan.epochs is not None:
            total = n * self._plan.epochs
            is_real = at < total
            at = np.minimum(at, total - 1)
        epochs = at // n if is_read else np.zeros_like(at)
        items = self._shuffled(at - epochs * n, epochs)
        rows = items
        if self._group > 1:
            rows, is_real = self._within_group(items, batches % self._group, is_real)
        draw = Draw(
            rows=rows.ravel(),
            epochs=epochs.ravel(),
            seed=self._plan.seed,
            floor=self.floor(first),
        )
        return BatchRows(draw=draw, first=first, n_batches=n_batches, is_real=is_real)

    def floor(self, batch: int) -> tuple[int, int]:
        """Gives epoch and lowest row that this batch and later ones of its epoch can need."""
        at = batch // self._group * self._plan.batch_size
        n = self._reach_groups(at + 1)
        epoch, at = divmod(at, n) if n <= at and n else (0, at)
        if self._plan.shuffle:
            at = at // self._window * self._window if self._window else 0
        return epoch, at * self._group

    def _shuffled(self, at: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Puts the item of the shuffled order in place of each position of an epoch."""
        if not self._plan.shuffle or not at.size:
            return at
        size = self._window or self._reach_groups(sys.maxsize // self._group)
        # One number for each window of each epoch: they are shuffled one by one.
        n_windows = int(at.max()) // size + 1
        windows = epochs if n_windows == 1 else epochs * n_windows + at // size
        if windows.min() == (last := int(windows.max())):
            return self._permuted(at, divmod(last, n_windows), size)
        items = np.empty_like(at)
        for window in np.unique(windows).tolist():
            here = windows == window
            items[here] = self._permuted(at[here], divmod(window, n_windows), size)
        return items

    def _permuted(self, at: np.ndarray, which: tuple[int, int], size: int) -> np.ndarray:
        """Shuffles within one window of one epoch; the last may be shorter than `size`."""
        epoch, window = which
        start = window * size
        n = self._reach_groups(start + size) - start
        return permutation.permute(at - start, n, (self._plan.seed, epoch, window)) + start

    def _within_group(
        self, items: np.ndarray, at: np.ndarray, is_real: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Takes the element `at` of each group; the last group of an epoch may not have it."""
        rows = items * self._group + at
        n = self._reader.reach(int(rows.max(initial=0)) + 1)
        inside = rows < n
        if inside.all():
            return rows, is_real
        return np.minimum(rows, n - 1), inside if is_real is None else inside & is_real

    def _reach_groups(self, n: int) -> int:
        """Gives `min(n, groups in an epoch)`; only padding keeps a shorter last group."""
        rows = self._reader.reach(n * self._group)
        return -(-rows // self._group) if self._plan.remainder == "pad" else rows // self._group

    def _count(self, n_groups: int) -> int | None:
        """Counts the batches of the run from the groups of an epoch."""
        plan = self._plan
        if n_groups == 0:
            rows = f"{self._group} rows in a row" if self._group > 1 else "example"
            raise DataError(f"{self._reader.name} has no {rows}, so there is no batch.")
        if plan.epochs is None:
            return None
        total = n_groups * plan.epochs
        full = (
            total // plan.batch_size if plan.remainder == "drop" else -(-total // plan.batch_size)
        )
        if full == 0:
            raise DataError(
                f"{self._reader.name} has fewer examples ({total} in {plan.epochs} epochs) than "
                f"one batch ({plan.batch_size}). Use remainder='pad' or 'keep', or a smaller batch."
            )
        return full * self._group
