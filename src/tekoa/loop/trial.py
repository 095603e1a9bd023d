"""Steps that run without a guard, and again with one where that was wrong.

A guard makes every update wait for all gradients, and on CPU the new state is stored before
it is chosen: a fifth of the time of a small convolutional network. So a step only counts
what is not finite. Now and then the count is read; if it has moved, the steps are run again
from the state before them, guarded, as if they had been so from the beginning.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.loop.dispatch import copied
from tekoa.loop.flat import FlatStep, Leaves, Outputs

# So many batches are kept: a wait after each costs a hundredth, a copy of the state more.
_MAX_STEPS = 64
_MAX_BYTES = 2**26


class Trial:
    """Remembers where unguarded steps began, and their batches.

    Args:
        free: The step without a guard, over lists of arrays.
        guarded: The step with it.
        is_fine: `is_fine(before, after)` -> whether the steps between two states met nothing bad.
    """

    def __init__(
        self,
        free: FlatStep,
        guarded: FlatStep,
        is_fine: Callable[[Leaves, Leaves], jax.Array],
    ):
        self.free = free
        self._guarded, self._is_fine = guarded, is_fine
        self._before: Leaves | None = None
        self._spare: Leaves | None = None
        self._batches: list[Any] = []
        self._n_due = _MAX_STEPS

    @property
    def is_due(self) -> bool:
        """Whether it is time to look, from the number and the shapes of batches alone."""
        return len(self._batches) >= self._n_due

    def add(self, leaves: Leaves, batch: Any, *, is_held: bool) -> None:
        """Takes note of a step that is about to run.

        Args:
            leaves: The state before it.
            batch: Its batch.
            is_held: Whether these arrays stay: else they are copied where that is needed.
        """
        if self._before is None:
            self._before = leaves if is_held else self._copied(leaves)
            n_fitting = _MAX_BYTES // max(1, trees.n_bytes(batch))
            self._n_due = max(1, min(_MAX_STEPS, n_fitting))
        self._batches.append(batch)

    def _copied(self, leaves: Leaves) -> Leaves:
        spare, self._spare = self._spare, None
        made: Leaves = _copied_into(spare, leaves) if spare else copied(leaves)
        self._spare = made
        return made

    def settled(self, leaves: Leaves) -> tuple[Leaves, Outputs] | None:
        """Waits for the steps; runs them again if they met something bad.

        What it gives, it gives again until `close` is called: an interrupt may come between.

        Args:
            leaves: The state after them.

        Returns:
            None if all is well, else the state in place of this one, and its output.
        """
        if self._before is None or bool(self._is_fine(self._before, leaves)):
            return None
        now, outputs = copied(self._before), []
        for batch in self._batches:
            now, outputs = self._guarded(now, batch)
        return now, outputs

    def close(self) -> None:
        """Forgets the steps: what they made is the state now."""
        self._batches = []
        self._before = None


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _copied_into(old: Leaves, leaves: Leaves) -> Leaves:
    """A copy that takes over the memory of an older one."""
    del old
    return [jnp.copy(x) for x in leaves]
