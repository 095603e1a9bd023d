"""Computes which rows make up batch i: a pure function of the plan, the length and i.

Positions count through all epochs, so batches span epoch boundaries and only the end of the
last epoch can leave a remainder. With `consecutive=n`, groups of n neighbouring rows are
ordered instead of rows. Batch i uses element `i mod n` of each of its groups, so that row j
of the next batch continues where row j of this one ends.

A shard is a contiguous part of each batch. For any number of shards, their concatenated
batches are the global batch.
"""

import dataclasses
import functools
import sys
from typing import Literal, NamedTuple, Protocol

import numpy as np

from tekoa.data.batching import permutation
from tekoa.data.batching.schedule import Numbers, Schedule
from tekoa.data.readers.base import DataError, Reader, RowRequest

Remainder = Literal["drop", "pad", "keep"]
Shuffle = bool | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How the rows of a source are ordered and cut into batches; see `Source.batches`."""

    batch_size: Numbers
    length: Numbers | None = None
    seed: int = 0
    shuffle: Shuffle = None
    epochs: int | None = None
    consecutive: int | None = None
    remainder: Remainder = "drop"
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self):
        if not (self.sizes.is_constant and self.lengths is None) and self.consecutive:
            raise ValueError(
                f"Rows of consecutive={self.consecutive} batches continue one another, so their "
                "number and length cannot change."
            )
        for name in ("epochs", "consecutive"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.shuffle is not None and not isinstance(self.shuffle, bool) and self.shuffle < 1:
            raise ValueError(f"shuffle must be None, True or at least 1, got {self.shuffle}.")
        if self.remainder not in ("drop", "pad", "keep"):
            raise ValueError(f"remainder must be 'drop', 'pad' or 'keep', got {self.remainder!r}.")
        if self.remainder == "keep" and self.consecutive:
            raise ValueError(
                f"remainder='keep' would shift the rows of consecutive={self.consecutive} batches. "
                "Use 'pad' or 'drop'."
            )
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(
                f"shard must be (index, count) with 0 <= index < count, got {self.shard}."
            )
        if uneven := [size for size in self.sizes.values if size % count]:
            raise ValueError(
                f"batch_size counts the rows of all shards and must be a multiple of their number, "
                f"got {uneven[0]} rows for {count} shards."
            )

    @functools.cached_property
    def sizes(self) -> Schedule:
        """Rows of every batch, over all shards."""
        return Schedule.of("batch_size", self.batch_size)

    @functools.cached_property
    def lengths(self) -> Schedule | None:
        """Length of the sequences of every batch; None for that of the examples."""
        return None if self.length is None else Schedule.of("length", self.length)

    def n_local(self, i: int) -> int:
        """Returns the rows of batch i in this shard."""
        return self.sizes.at(i) // self.shard[1]

    def local_rows(self, i: int) -> np.ndarray:
        """Returns which rows of batch i belong to this shard."""
        n_local = self.n_local(i)
        return np.arange(n_local) + self.shard[0] * n_local


class BatchRows(NamedTuple):
    """The rows of some successive batches of one shard.

    Attributes:
        request: Request for the reader: (number of batches x rows per batch), flattened.
        first: Number of the first batch.
        n_batches: Number of batches; 0 past the end.
        is_real: False for rows that are padding; None if there is no padding.
    """

    request: RowRequest
    first: int
    n_batches: int
    is_real: np.ndarray | None

    def part(self, first: int, n_batches: int) -> "BatchRows":
        """Returns the rows of `n_batches` of the batches, or fewer at the end."""
        n_local = len(self.request.rows) // self.n_batches
        start = first - self.first
        n_batches = min(n_batches, self.n_batches - start)
        flat = slice(start * n_local, (start + n_batches) * n_local)
        return BatchRows(
            self.request._replace(rows=self.request.rows[flat], epochs=self.request.epochs[flat]),
            first,
            n_batches,
            None if self.is_real is None else self.is_real[start : start + n_batches],
        )


class BatchOrder(Protocol):
    """Which rows form batch i; `Order`, or the order of a mixture or of length buckets.

    Attributes:
        has_one_shape: Whether the examples of all batches have the same shapes.
    """

    has_one_shape: bool

    @property
    def kind(self) -> str:
        """Short name of the order, part of the fingerprint of a saved position."""
        ...

    def n_batches(self) -> int | None:
        """Returns the number of batches of the run, or None if it is endless."""
        ...

    def rows(self, first: int, n_batches: int) -> BatchRows:
        """Returns the rows of `n_batches` batches from number `first` on.

        Fewer at the end, and where the size of batches changes.
        """
        ...

    def floor(self, batch: int) -> tuple[int, int]:
        """Returns the epoch and the lowest row that this batch and later ones can need."""
        ...

    def examples_per_source(self, batch: int) -> dict[str, int]:
        """Returns how many examples of each mixed source the batches before this one have."""
        ...


class MakeOrder(Protocol):
    """Creates the order of a reader's rows under a plan; can be sent to another process."""

    def __call__(self, reader: Reader, plan: BatchPlan, /) -> BatchOrder: ...


def count_batches(n_examples: int, plan: BatchPlan, name: str) -> int:
    """Returns how many batches a number of examples makes.

    Raises:
        DataError: If it makes none.
    """
    n_full = plan.sizes.n_within(n_examples)
    n_rest = n_examples - plan.sizes.total(n_full)
    n_batches = n_full + (n_rest > 0 and plan.remainder != "drop")
    if n_batches == 0:
        raise DataError(
            f"{name} has fewer examples ({n_examples} in {plan.epochs} epochs) than one batch "
            f"({plan.sizes.at(0)}). Use a smaller batch_size, or batches(..., remainder='keep')."
        )
    return n_batches


class Order:
    """The order in which a reader's rows are batched under a plan."""

    has_one_shape = True

    def __init__(self, reader: Reader, plan: BatchPlan):
        self._reader, self._plan = reader, plan
        self._group = plan.consecutive or 1
        self._window = self._shuffle_window()

    @property
    def kind(self) -> str:
        """Short name of the order, part of the fingerprint of a saved position."""
        if not self._plan.shuffle:
            return "in order"
        return f"within {self._window}" if self._window else "permuted"

    def _shuffle_window(self) -> int | None:
        shuffle = self._plan.shuffle
        if self._reader.is_stream and shuffle is True:
            raise DataError(
                f"{self._reader.name} can only be read forwards, so it has no full shuffle. "
                "Set a window size, such as shuffle=10000."
            )
        # With random access, a full permutation costs no more than a window and mixes better.
        is_windowed = self._reader.is_lazy and shuffle and shuffle is not True
        return int(shuffle) if is_windowed and shuffle else None

    def n_batches(self) -> int | None:
        """Returns the number of batches of the run, or None if it is endless.

        Raises:
            DataError: If there are too few examples for a batch.
        """
        # An endless run only needs one group of examples.
        n_groups = 1 if self._plan.epochs is None else sys.maxsize // self._group
        return self._count(self._reach_groups(n_groups))

    def rows(self, first: int, n_batches: int) -> BatchRows:
        """Returns the rows of `n_batches` batches of equal size, or fewer at the end.

        Args:
            first: Number of the first batch, from 0.
            n_batches: Number of batches.
        """
        sizes, first_group = self._plan.sizes, first // self._group
        n_batches = min(n_batches, sizes.n_same(first))
        end = sizes.total((first + n_batches - 1) // self._group + 1)
        n = self._reach_groups(end)
        is_complete = n < end  # Then `n` is the number of groups in an epoch.
        if is_complete and (n_all := self._count(n)) is not None:
            n_batches = max(0, min(n_batches, n_all - first))
        batches = np.arange(first, first + n_batches)[:, None]
        start, n_groups = sizes.total(first_group), batches // self._group - first_group
        at = start + n_groups * sizes.at(first) + self._plan.local_rows(first)
        is_real = None
        if is_complete and self._plan.epochs is not None:
            total = n * self._plan.epochs
            is_real = at < total
            at = np.minimum(at, total - 1)
        epochs = at // n if is_complete else np.zeros_like(at)
        rows = self._shuffle(at - epochs * n, epochs)
        if self._group > 1:
            rows, is_real = self._select_in_groups(rows, batches % self._group, is_real)
        floor = self.floor(first)
        request = RowRequest(rows.ravel(), epochs.ravel(), seed=self._plan.seed, floor=floor)
        return BatchRows(request=request, first=first, n_batches=n_batches, is_real=is_real)

    def floor(self, batch: int) -> tuple[int, int]:
        """Returns the epoch and the lowest row that this batch and later ones can need."""
        at = self._plan.sizes.total(batch // self._group)
        n = self._reach_groups(at + 1)
        epoch, at = divmod(at, n) if n <= at and n else (0, at)
        if self._plan.shuffle:
            at = at // self._window * self._window if self._window else 0
        return epoch, at * self._group

    def examples_per_source(self, batch: int) -> dict[str, int]:
        """Returns nothing: there is one source."""
        return {}

    def _shuffle(self, at: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Maps each position in an epoch to its item in the shuffled order."""
        if not self._plan.shuffle or not at.size:
            return at
        size = self._window or self._reach_groups(sys.maxsize // self._group)
        # Number the windows of all epochs: each is shuffled separately.
        n_windows = int(at.max()) // size + 1
        windows = epochs if n_windows == 1 else epochs * n_windows + at // size
        if windows.min() == (last := int(windows.max())):
            return self._permute(at, divmod(last, n_windows), size)
        items = np.empty_like(at)
        for window in np.unique(windows).tolist():
            in_window = windows == window
            items[in_window] = self._permute(at[in_window], divmod(window, n_windows), size)
        return items

    def _permute(self, at: np.ndarray, epoch_and_window: tuple[int, int], size: int) -> np.ndarray:
        """Shuffles within one window of one epoch; the last may be shorter than `size`."""
        epoch, window = epoch_and_window
        start = window * size
        n = self._reach_groups(start + size) - start
        return permutation.permute(at - start, n, (self._plan.seed, epoch, window)) + start

    def _select_in_groups(
        self, groups: np.ndarray, at: np.ndarray, is_real: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Selects element `at` of each group; the last group of an epoch may be too short."""
        rows = groups * self._group + at
        n = self._reader.reach(int(rows.max(initial=0)) + 1)
        inside = rows < n
        if inside.all():
            return rows, is_real
        return np.minimum(rows, n - 1), inside if is_real is None else inside & is_real

    def _reach_groups(self, n: int) -> int:
        """Returns `min(n, groups in an epoch)`; only padding keeps a short last group."""
        rows = self._reader.reach(n * self._group)
        return -(-rows // self._group) if self._plan.remainder == "pad" else rows // self._group

    def _count(self, n_groups: int) -> int | None:
        """Computes the number of batches of the run from the groups of an epoch."""
        plan = self._plan
        if n_groups == 0:
            rows = f"{self._group} consecutive rows" if self._group > 1 else "examples"
            raise DataError(f"{self._reader.name} has no {rows}, so it has no batches.")
        if plan.epochs is None:
            return None
        return count_batches(n_groups * plan.epochs, plan, self._reader.name) * self._group
