"""Batches of a source, one after the other, with a position that can be saved.

The iterator's only state is the number of the next batch. What is read ahead (a block of
batches in one gather, batches under way in worker processes) never shows in `state()`.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekoa.data import stacking, workers
from tekoa.data.order import BatchRows, Order, Plan
from tekoa.data.reader import ChangedDataError, DataError, Reader

VERSION = 1

# Rows ordered in one go: numpy's cost per call spread over many batches.
_ORDERED_ROWS = 8192


class BatchMaker:
    """Makes any batch of a plan from its number; can be sent to another process."""

    def __init__(self, reader: Reader, plan: Plan):
        self.reader, self.plan = reader, plan
        self.order = Order(reader, plan)
        n_local = plan.batch_size // plan.shard[1]
        # A stream is read no further than needed, so that it can be resumed where it is.
        self.block = 1 if reader.is_lazy else max(1, reader.block_rows // n_local)
        self._n_ordered = 1 if reader.is_lazy else max(1, _ORDERED_ROWS // n_local)
        self._ordered: BatchRows | None = None

    def make(self, first: int, n_batches: int) -> list[Any]:
        """Makes `n_batches` batches from number `first` on, fewer at the end."""
        rows = self._rows(first, n_batches)
        if rows.n_batches == 0:
            return []
        gathered = self.reader.gather(rows.draw)
        if self.plan.remainder == "pad":
            gathered = self._with_mask(gathered, rows)
        batches = stacking.split(gathered, rows.n_batches)
        if self.plan.remainder == "keep" and rows.is_real is not None:
            n_last = int(rows.is_real[-1].sum())
            batches[-1] = stacking.map_arrays(lambda a: a[:n_last], batches[-1])
        return batches

    def _rows(self, first: int, n_batches: int) -> BatchRows:
        ordered = self._ordered
        if ordered is None or not 0 <= first - ordered.first < ordered.n_batches:
            ordered = self.order.rows(first, max(n_batches, self._n_ordered))
            self._ordered = ordered
        return ordered.part(first, n_batches) if ordered.n_batches else ordered

    def _with_mask(self, gathered: Any, rows: BatchRows) -> Any:
        if not isinstance(gathered, dict) or "mask" in gathered:
            raise DataError(
                "remainder='pad' adds a field 'mask' to examples that are dicts without one; "
                f"{self.reader.name} gives {list(gathered)}. Change them with source.map, or use "
                "remainder='keep'."
            )
        if rows.is_real is None:
            return {**gathered, "mask": np.ones(len(rows.draw.rows), bool)}
        mask = rows.is_real.ravel()
        # Else a sum over tokens would count the filling.
        masked = {
            key: np.where(mask.reshape(-1, *[1] * (field.ndim - 1)), field, False)
            for key, field in gathered.items()
            if key.endswith("_mask") and isinstance(field, np.ndarray) and field.dtype == np.bool_
        }
        return {**gathered, **masked, "mask": mask}


class Batches(Iterator[Any]):
    """Iterates over batches; made by `Source.batches`.

    >>> from tekoa import data
    >>> batches = data.as_source({'x': np.arange(6)}).batches(2)
    >>> next(batches)['x'], batches.state()['batch']
    (array([0, 1]), 1)
    """

    def __init__(self, reader: Reader, plan: Plan, *, n_workers: int = 0):
        self._maker = BatchMaker(reader, plan)
        if not reader.is_lazy:
            self._maker.order.n_batches()  # Refuses an impossible plan before training starts.
        self._pool = workers.Pool(self._maker, n_workers) if n_workers else None
        self._fingerprint = _fingerprint(self._maker)
        self._next = 0
        self._block: list[Any] = []
        self._block_start = 0

    @property
    def n_batches(self) -> int | None:
        """How many batches there are in all, None if without end; may read to the end."""
        return self._maker.order.n_batches()

    def __next__(self) -> Any:
        at = self._next - self._block_start
        if not 0 <= at < len(self._block):
            self._block = self._make_block()
            self._block_start, at = self._next, 0
            if not self._block:
                raise StopIteration
        self._next += 1
        return self._block[at]

    def _make_block(self) -> list[Any]:
        if self._pool is not None:
            return self._pool.make(self._next)
        return self._maker.make(self._next, self._maker.block)

    def state(self) -> dict[str, Any]:
        """Gives the position after the last batch handed out: a few hundred bytes of JSON."""
        state = {
            "version": VERSION,
            "batch": self._next,
            "examples": self._next * self._maker.plan.batch_size,
            "fingerprint": dict(self._fingerprint),
        }
        if self._maker.reader.is_lazy and self._pool is None:
            floor = self._maker.order.floor(self._next)
            state["anchor"] = self._maker.reader.anchor(floor)
        return state

    def restore(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Goes on from a saved position, at the cost of one batch.

        Args:
            state: What `state()` gave, on any number of shards.
            allow_changes: Go on even if source, seed, batch size or order have changed:
                at the first whole batch after as many examples.

        Raises:
            ChangedDataError: If they have changed and `allow_changes` is false.
        """
        _check_state(state)
        differences = _differences(state["fingerprint"], self._fingerprint)
        if differences and not allow_changes:
            raise ChangedDataError(
                "The saved position belongs to other data or another order: "
                + "; ".join(differences)
                + ". Put it back, or restore with allow_changes=True to go on at example "
                f"{state['examples']} of the new order."
            )
        size = self._maker.plan.batch_size
        self._next = -(-state["examples"] // size) if differences else state["batch"]
        self._block = []
        if not differences and state.get("anchor") is not None:
            self._maker.reader.resume(state["anchor"])

    def close(self) -> None:
        """Ends the worker processes, if any."""
        if self._pool is not None:
            self._pool.close()


def _fingerprint(maker: BatchMaker) -> dict[str, Any]:
    """Tells apart orders that differ in some batch; more epochs only add batches at the end."""
    plan, name = maker.plan, maker.reader.name
    return {
        "source": name if len(name) <= 120 else f"{name[:100]}... #{zlib.crc32(name.encode()):08x}",
        "seed": plan.seed,
        "batch_size": plan.batch_size,
        "order": maker.order.kind,
        "consecutive": plan.consecutive,
        "remainder": plan.remainder,
    }


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {saved.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]


def _check_state(state: dict[str, Any]) -> None:
    missing = [key for key in ("version", "batch", "examples", "fingerprint") if key not in state]
    if missing:
        raise ChangedDataError(
            f"This is no position of tekoa.data: {missing} not found among {sorted(state)}."
        )
    if state["version"] != VERSION:
        raise ChangedDataError(
            f"The saved position has version {state['version']}, this tekoa reads {VERSION}."
        )
