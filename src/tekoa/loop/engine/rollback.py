"""Runs steps without a guard against NaN and Inf, and replays them with one if necessary.

A guard makes every update wait for all gradients, and on CPU the new state is stored before it is
selected, which takes a fifth of the time of a small convolutional network. So steps only count
NaN and Inf. From time to time the count is read. If it has changed, the steps since the last check
are replayed from the state before them, with a guard for those that need it.

Each dispatch is replayed by itself, so its result depends on the state and the batch alone, not
on when the count was read: a resumed run computes the same bits.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.loop.engine.dispatch import copy_leaves
from tekoa.loop.engine.flat_state import FlatStep, Leaves, Outputs

# Limits of the recorded batches. Waiting this rarely costs 1%; copying the state costs more.
_MAX_DISPATCHES = 64
_MAX_BYTES = 2**26


class Rollback:
    """Remembers the state before unguarded steps, and their batches.

    Args:
        guarded: Each program and its guarded counterpart, over lists of arrays; a program that is
            guarded is its own.
        all_finite_since: `all_finite_since(before, after)` -> whether no step between two states
            met NaN or Inf.
        same_count: `same_count(before, after)` -> the same from the counts alone, which is enough
            if the last step was guarded: it has checked the parameters.
    """

    def __init__(
        self,
        guarded: Mapping[FlatStep, FlatStep],
        all_finite_since: Callable[[Leaves, Leaves], jax.Array],
        same_count: Callable[[Leaves, Leaves], bool],
    ):
        self._guarded = guarded
        self._all_finite_since, self._same_count = all_finite_since, same_count
        self._before: Leaves = []
        self._spare: Leaves | None = None
        self._dispatches: list[tuple[FlatStep, Any]] = []
        self._n_bytes = self._n_bytes_each = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to verify; depends on the number and size of batches alone."""
        is_full = self._n_bytes + self._n_bytes_each > _MAX_BYTES
        return len(self._dispatches) >= _MAX_DISPATCHES or is_full

    def add(self, program: FlatStep, leaves: Leaves, batch: Any, *, is_held: bool) -> None:
        """Records a dispatch that is about to run.

        Args:
            program: The program, one of those that have a guarded counterpart.
            leaves: The state before it.
            batch: Its batch, or several of them stacked.
            is_held: Whether these arrays stay valid; otherwise they are copied if necessary.
        """
        if not self._dispatches:
            self._before = leaves if is_held else self._copy(leaves)
        if not self._dispatches or self._dispatches[-1][0] is not program:
            self._n_bytes_each = trees.n_bytes(batch)
        self._n_bytes += self._n_bytes_each
        self._dispatches.append((program, batch))

    def _copy(self, leaves: Leaves) -> Leaves:
        spare, self._spare = self._spare, None  # Consumed, even if an interrupt comes.
        copy: Leaves = _copy_into(spare, leaves) if spare else copy_leaves(leaves)
        self._spare = copy
        return copy

    def verify(self, leaves: Leaves, *, all_ran: bool) -> tuple[Leaves, Outputs] | None:
        """Waits for the recorded steps, and replays them if one met NaN or Inf.

        Until `close` is called, a second call returns the same: an interrupt may come in between.

        Args:
            leaves: The state after the steps.
            all_ran: Whether it is certain that the last recorded dispatch has run.

        Returns:
            None if all steps were finite; else the replacement for `leaves` and the last output.
        """
        if not self._dispatches:
            return None
        last = self._dispatches[-1][0]
        is_guarded = all_ran and self._guarded[last] is last
        is_good = self._same_count if is_guarded else self._all_finite_since
        if is_good(self._before, leaves):
            return None
        leaves, outputs = copy_leaves(self._before), []
        for program, batch in self._dispatches:
            new, outputs = program(copy_leaves(leaves), batch)
            if not self._all_finite_since(leaves, new):
                new, outputs = self._guarded[program](copy_leaves(leaves), batch)
            leaves = new
        return leaves, outputs

    def close(self) -> None:
        """Discards the recorded steps, whose result is now final."""
        self._dispatches = []  # First: without them nothing is replayed, should an interrupt come.
        self._before = []
        self._n_bytes = self._n_bytes_each = 0


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _copy_into(old: Leaves, leaves: Leaves) -> Leaves:
    """Copies arrays into the memory of an older copy."""
    del old
    return [jnp.copy(x) for x in leaves]
