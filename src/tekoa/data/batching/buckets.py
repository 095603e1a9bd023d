"""Length buckets: each batch has examples of similar length, padded to the same one.

Every bucket is walked by itself, epoch after epoch, and its examples are cut into batches there,
across the ends of epochs. A batch belongs to the epoch in which it is complete. The batches of an
epoch are shuffled.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tekoa.data.batching import permutation, ragged
from tekoa.data.batching.order import BatchPlan, BatchRows
from tekoa.data.readers.base import DataError, Info, RandomAccess, Reader, RowRequest, describe

# Separates the order of the batches of an epoch from that of the examples of a bucket.
_BATCHES = 0xB4C


class PaddedReader(RandomAccess):
    """Examples padded with zeros to the limit of their bucket; see `Source.bucket`."""

    def __init__(self, base: Reader, limits: Sequence[int], fields: Sequence[str], lengths: Any):
        if base.is_stream:
            raise DataError(
                f"{base.name} can only be read forwards, so it has no length buckets. Convert it "
                "to a format with random access, such as jsonl or array_record."
            )
        self._base, self._limits, self._fields = base, list(limits), tuple(fields)
        self._lengths = ragged.lengths_of(base, fields[0], lengths)
        if (longest := int(self._lengths.max(initial=0))) > self._limits[-1]:
            row = int(self._lengths.argmax())
            raise DataError(
                f"{base.name}, row {row}: {fields[0]!r} has {longest} elements, more than the "
                f"largest bucket, {self._limits[-1]}. Add a bucket, or cut the examples with "
                "source.map."
            )
        self.bucket_of_row = np.searchsorted(self._limits, self._lengths)
        self.name = f"{base.name}, padded to {self._limits}"

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def info(self) -> Info:
        base, shapes = self._base.info, describe(self.name, self.first())
        return dataclasses.replace(
            base, name=self.name, shapes=shapes.shapes, dtypes=shapes.dtypes, value_range=None
        )

    def gather(self, request: RowRequest) -> Any:
        lengths = self._lengths[request.rows]
        limit = self._limits[int(self.bucket_of_row[request.rows].max(initial=0))]
        examples = list(ragged.read_examples(self._base, request))
        padded: dict[str, Any] = {
            name: np.concatenate([one[name] for one in examples])
            for name in examples[0]
            if name not in self._fields
        }
        for at, (one, n) in enumerate(zip(examples, lengths.tolist(), strict=True)):
            values = ragged.fields_of(one, self._fields, n, self._base)
            for name, value in zip(self._fields, values, strict=True):
                if name not in padded:
                    shape = (len(lengths), limit, *value.shape[1:])
                    padded[name] = np.zeros(shape, value.dtype)
                padded[name][at, :n] = value
        return {**padded, "token_mask": np.arange(limit) < lengths[:, None]}


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Creates the order of a reader whose rows belong to buckets.

    Attributes:
        bucket_of_row: The bucket of each row.
        limits: The largest length in each bucket, for the fingerprint.
    """

    bucket_of_row: np.ndarray
    limits: tuple[int, ...]

    def __call__(self, reader: Reader, plan: BatchPlan, /) -> "BucketOrder":
        return BucketOrder(self, reader, plan)


class BucketOrder:
    """The order of bucketed batches under a plan; see `BatchOrder`."""

    has_one_shape = False

    def __init__(self, buckets: Buckets, reader: Reader, plan: BatchPlan):
        if plan.consecutive:
            raise DataError(f"{reader.name} has length buckets and no consecutive batches.")
        if not plan.sizes.is_constant or plan.lengths is not None:
            raise DataError(
                f"{reader.name} has length buckets, each of which is cut into batches by itself, "
                "so the rows and lengths of batches cannot follow a schedule. Use pack instead."
            )
        self._size = plan.sizes.at(0)
        self._plan, self._limits, self._name = plan, buckets.limits, reader.name
        self._local = plan.local_rows(0)
        self._rows = [np.flatnonzero(buckets.bucket_of_row == b) for b in range(len(self._limits))]
        self._sizes = [len(rows) for rows in self._rows]

    @property
    def kind(self) -> str:
        order = "permuted" if self._plan.shuffle else "in order"
        return f"buckets {list(self._limits)}, {order}"

    def n_batches(self) -> int | None:
        if self._plan.epochs is None:
            return None
        n_batches = self._n_until(self._plan.epochs)
        if not n_batches:
            raise DataError(
                f"{self._name} has fewer examples in each bucket ({self._sizes}) than one batch "
                f"({self._size}). Use remainder='pad' or 'keep', or a smaller batch."
            )
        return n_batches

    def floor(self, batch: int) -> tuple[int, int]:
        """Returns the start: all rows can be read directly."""
        return 0, 0

    def examples_per_source(self, batch: int) -> dict[str, int]:
        """Returns nothing: there is one source."""
        return {}

    def rows(self, first: int, n_batches: int) -> BatchRows:
        """Returns the rows of up to `n_batches` batches, no further than the end of an epoch."""
        if (n_all := self.n_batches()) is not None and first >= n_all:
            n_batches, epoch = 0, 0
        else:
            epoch = self._epoch_of(first)
            n_batches = min(n_batches, self._n_until(epoch + 1) - first)
        shape = (n_batches, len(self._local))
        rows, epochs, is_real = np.zeros(shape, np.int64), np.zeros(shape, np.int64), None
        if self._plan.epochs is not None:
            is_real = np.zeros(shape, bool)
        buckets, numbers = self._numbers(np.arange(first, first + n_batches), epoch)
        for bucket in np.unique(buckets).tolist():
            here, size = buckets == bucket, self._sizes[bucket]
            places = numbers[here, None] * self._size + self._local
            if is_real is not None and self._plan.epochs is not None:
                is_real[here] = places < size * self._plan.epochs
                places = np.minimum(places, size * self._plan.epochs - 1)
            epochs[here], in_bucket = np.divmod(places, size)
            rows[here] = self._rows[bucket][self._shuffle(in_bucket, epochs[here], bucket)]
        request = RowRequest(rows.ravel(), epochs.ravel(), seed=self._plan.seed)
        return BatchRows(request=request, first=first, n_batches=n_batches, is_real=is_real)

    def _epoch_of(self, i: int) -> int:
        """Returns the epoch in which batch i is complete."""
        # After that many epochs there are more batches, though each bucket may miss one.
        limit = (i + 1 + len(self._sizes)) * self._size // max(1, sum(self._sizes)) + 2
        if self._plan.epochs is not None:
            limit = min(limit, self._plan.epochs)
        return bisect.bisect_right(range(limit), i, key=self._n_until) - 1

    def _numbers(self, batches: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bucket of each batch of an epoch, and its number in that bucket."""
        first, end = (
            np.array([self._n_of_bucket(bucket, e) for bucket in range(len(self._sizes))])
            for e in (epoch, epoch + 1)
        )
        at, ends = batches - first.sum(), np.cumsum(end - first)
        if self._plan.shuffle:
            at = permutation.permute(at, int(ends[-1]), (self._plan.seed, epoch, _BATCHES))
        buckets = np.searchsorted(ends, at, side="right")
        return buckets, end[buckets] - (ends[buckets] - at)

    def _n_until(self, epoch: int) -> int:
        """Returns the number of batches that are complete after so many epochs."""
        return sum(self._n_of_bucket(bucket, epoch) for bucket in range(len(self._sizes)))

    def _n_of_bucket(self, bucket: int, epoch: int) -> int:
        n_full, n_rest = divmod(self._sizes[bucket] * epoch, self._size)
        # Only the end of the last epoch leaves a remainder.
        is_short = n_rest > 0 and self._plan.remainder != "drop" and epoch == self._plan.epochs
        return n_full + is_short

    def _shuffle(self, at: np.ndarray, epochs: np.ndarray, bucket: int) -> np.ndarray:
        if not self._plan.shuffle:
            return at
        shuffled = np.empty_like(at)
        for epoch in np.unique(epochs).tolist():
            is_here = epochs == epoch
            key = (self._plan.seed, epoch, bucket)
            shuffled[is_here] = permutation.permute(at[is_here], self._sizes[bucket], key)
        return shuffled
