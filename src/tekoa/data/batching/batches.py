"""An iterator over the batches of a source, with a data position that can be saved.

Its only state is the number of the next batch. Batches that are read ahead (in blocks or by
worker processes) do not affect `state()`.
"""

import operator
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekoa.data.batching import lengths, stacking, workers
from tekoa.data.batching.order import BatchPlan, BatchRows, MakeOrder, Order
from tekoa.data.batching.schedule import Schedule
from tekoa.data.readers.base import ChangedDataError, DataError, Reader, other_position

VERSION = 1

# Number of rows to order in one call, to spread numpy's overhead over many batches.
_ORDERED_ROWS = 8192


class BatchMaker:
    """Creates any batch of a plan from its number; can be sent to another process."""

    def __init__(self, reader: Reader, plan: BatchPlan, make_order: MakeOrder):
        self.reader, self.plan = reader, plan
        self.order = make_order(reader, plan)
        self._ordered: BatchRows | None = None

    def make_block(self, first: int) -> list[Any]:
        """Creates as many batches from number `first` on as are worth reading at once."""
        return self.make(first, self._n_within(self.reader.block_rows, first))

    def make(self, first: int, n_batches: int) -> list[Any]:
        """Creates `n_batches` batches from number `first` on, or fewer at the end.

        Fewer also if the rows or the length of batches change.
        """
        if self.plan.lengths is not None:
            n_batches = min(n_batches, self.plan.lengths.n_same(first))
        rows = self._rows(first, n_batches)
        if rows.n_batches == 0:
            return []
        examples = self.reader.gather(rows.request)
        if self.plan.remainder == "pad":
            examples = self._add_mask(examples, rows)
        batches = stacking.split(examples, rows.n_batches)
        if self.plan.remainder == "keep" and rows.is_real is not None:
            n_last = int(rows.is_real[-1].sum())
            batches[-1] = stacking.map_arrays(lambda a: a[:n_last], batches[-1])
        if self.plan.lengths is None:
            return batches
        name = self.reader.name
        return [lengths.cut(batch, self.plan.lengths, first, name) for batch in batches]

    def _n_within(self, n_rows: int, first: int) -> int:
        """Returns how many batches to read for a number of rows."""
        # A stream is read no further than needed, so that its position stays exact.
        return 1 if self.reader.is_lazy else max(1, n_rows // self.plan.n_local(first))

    def _rows(self, first: int, n_batches: int) -> BatchRows:
        ordered = self._ordered
        if ordered is None or not 0 <= first - ordered.first < ordered.n_batches:
            n_ordered = self._n_within(_ORDERED_ROWS, first)
            ordered = self.order.rows(first, max(n_batches, n_ordered))
            self._ordered = ordered
        return ordered.part(first, n_batches) if ordered.n_batches else ordered

    def _add_mask(self, examples: Any, rows: BatchRows) -> Any:
        if not isinstance(examples, dict) or "mask" in examples:
            raise DataError(
                "remainder='pad' adds a field 'mask' and needs examples that are dicts without "
                f"one, but those of {self.reader.name} have {list(examples)}. Change them with "
                "source.map, or use remainder='keep'."
            )
        if rows.is_real is None:
            return {**examples, "mask": np.ones(len(rows.request.rows), bool)}
        mask = rows.is_real.ravel()
        # Otherwise a sum over tokens would count the padding.
        masked = {
            key: np.where(mask.reshape(-1, *[1] * (field.ndim - 1)), field, False)
            for key, field in examples.items()
            if key.endswith("_mask") and isinstance(field, np.ndarray) and field.dtype == np.bool_
        }
        return {**examples, **masked, "mask": mask}


class Batches(Iterator[Any]):
    """An iterator over batches; created by `Source.batches`.

    >>> from tekoa import data
    >>> batches = data.as_source({'x': np.arange(6)}).batches(2)
    >>> next(batches)['x'], batches.state()['batch']
    (array([0, 1]), 1)
    >>> batches.seek(10)
    >>> next(batches)['x']
    array([2, 3])
    """

    def __init__(
        self,
        reader: Reader,
        plan: BatchPlan,
        *,
        n_workers: int = 0,
        make_order: MakeOrder = Order,
    ):
        self._maker = BatchMaker(reader, plan, make_order)
        if not reader.is_lazy:
            self._maker.order.n_batches()  # Rejects an impossible plan before training starts.
        self._pool = workers.Pool(self._maker, n_workers) if n_workers else None
        self._fingerprint = _fingerprint(self._maker)
        self._next = 0
        self._block: list[Any] = []
        self._block_start = 0

    @property
    def n_batches(self) -> int | None:
        """Total number of batches, or None if endless; may read the data to its end."""
        return self._maker.order.n_batches()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of the batches, over all shards: one number, or several if they change."""
        return self._maker.plan.sizes.values

    @property
    def has_one_shape(self) -> bool:
        """Whether all batches but a short last one have the same shapes."""
        plan = self._maker.plan
        is_planned = any(s is not None and not s.is_constant for s in (plan.sizes, plan.lengths))
        return not is_planned and self._maker.order.has_one_shape

    @property
    def examples_per_source(self) -> dict[str, int]:
        """How many examples of each source of a mixture were returned; empty if it is none."""
        return self._maker.order.examples_per_source(self._next)

    def __next__(self) -> Any:
        at = self._next - self._block_start
        if not 0 <= at < len(self._block):
            if self._pool is not None:
                self._block = self._pool.make(self._next)
            else:
                self._block = self._maker.make_block(self._next)
            self._block_start, at = self._next, 0
            if not self._block:
                raise StopIteration
        self._next += 1
        return self._block[at]

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch returned: a few hundred bytes of JSON."""
        state = {
            "version": VERSION,
            "batch": self._next,
            "examples": self._maker.plan.sizes.total(self._next),
            "fingerprint": dict(self._fingerprint),
        }
        if self._maker.reader.is_lazy and self._pool is None:
            floor = self._maker.order.floor(self._next)
            state["anchor"] = self._maker.reader.anchor(floor)
        if counts := self.examples_per_source:
            state["examples_per_source"] = counts
        return state

    def seek(self, i: int) -> None:
        """Moves to batch `i`: the next batch is the i-th of a new iterator, counted from 0.

        Costs one batch with random access. A stream or text file is read up to the batch if it
        has not been read that far.

        Raises:
            ValueError: If `i` is negative.
        """
        if (i := operator.index(i)) < 0:
            raise ValueError(f"Batches are counted from 0, got seek({i}).")
        self._next, self._block = i, []

    def restore(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Continues from a saved position, at the cost of one batch.

        Args:
            state: The result of `state()`, on any number of shards.
            allow_changes: Continue even if source, seed, batch size or order have changed, at
                the first complete batch after the same number of examples.

        Raises:
            ChangedDataError: If they have changed and `allow_changes` is false.
        """
        _check_state(state)
        n_done = state["batch"]
        saved, now = (_until(f, n_done) for f in (state["fingerprint"], self._fingerprint))
        differences = [
            f"{key} was {saved.get(key)!r}, is {now.get(key)!r}"
            for key in sorted(saved.keys() | now.keys())
            if saved.get(key) != now.get(key)
        ]
        if differences and not allow_changes:
            raise ChangedDataError(
                "The saved data position belongs to other data or another order: "
                + "; ".join(differences)
                + ". Undo the change, or restore with allow_changes=True to continue at example "
                f"{state['examples']} of the new order."
            )
        self.seek(self._first_after(state["examples"]) if differences else n_done)
        if not differences and state.get("anchor") is not None:
            self._maker.reader.resume(state["anchor"])

    def _first_after(self, n_examples: int) -> int:
        """Returns the first batch that starts at an example, or after it."""
        sizes = self._maker.plan.sizes
        n_within = sizes.n_within(n_examples)
        return n_within + (sizes.total(n_within) < n_examples)

    def close(self) -> None:
        """Stops the worker processes, if any."""
        if self._pool is not None:
            self._pool.close()


def _fingerprint(maker: BatchMaker) -> dict[str, Any]:
    """Returns what determines the batches, except `epochs`, which only adds some at the end."""
    plan, name = maker.plan, maker.reader.name
    fingerprint = {
        "source": name if len(name) <= 120 else f"{name[:100]}... #{zlib.crc32(name.encode()):08x}",
        "seed": plan.seed,
        "batch_size": plan.sizes.as_json(),
        "order": maker.order.kind,
        "consecutive": plan.consecutive,
        "remainder": plan.remainder,
    }
    return fingerprint | ({} if plan.lengths is None else {"length": plan.lengths.as_json()})


def _until(fingerprint: dict[str, Any], n_batches: int) -> dict[str, Any]:
    """Returns a fingerprint with the schedules as they concern the batches so far.

    Changes that are still to come may be planned anew, as the number of epochs may.
    """
    scheduled = {
        key: Schedule.parse(key, fingerprint[key]).before(n_batches).as_json()
        for key in ("batch_size", "length")
        if key in fingerprint
    }
    return {**fingerprint, **scheduled}


def _check_state(state: dict[str, Any]) -> None:
    missing = [key for key in ("version", "batch", "examples", "fingerprint") if key not in state]
    if missing:
        raise other_position(state, "a Source")
    if state["version"] != VERSION:
        raise ChangedDataError(
            f"The saved data position has version {state['version']!r}, but this version of tekoa "
            f"reads version {VERSION}."
        )
