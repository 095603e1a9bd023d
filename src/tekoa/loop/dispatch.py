"""How many steps go into one dispatch, chosen by measuring on the running program.

A small model spends much of a step in handing it to the device; several steps in one
`lax.scan` save that. For others a scan is no gain, and on CPU convolutions in a scan are
many times slower. So it is tried, on a copy of the state, and what was chosen is a fact
of the run: a resumed run reuses it, since the two ways may differ in the last bit. When
it is tried depends on the number of steps alone, for the same reason.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.loop.flat import FlatStep, Leaves, Outputs

StepsPerDispatch = int | Literal["auto"]

# A run of fewer short steps ends before a second program would pay for its compilation.
_FIRST_STEP = 1000
_N_TOGETHER = 8
# Above this a step is too long for the cost of its dispatch to matter.
_SHORT_STEP_SECONDS = 1.5e-3
# A scan must pay clearly, or noise would choose it.
_GAIN = 0.95
_N_ROUNDS = 5
_N_STEPS_PER_ROUND = 5 * _N_TOGETHER


class Dispatcher:
    """Runs steps one by one or several at a time.

    Args:
        step: The step over lists of arrays.
        wanted: Steps per dispatch, or "auto".
        jit: Compiles a function that takes over its first argument.

    Attributes:
        n_together: Steps per dispatch; None until "auto" has measured.
    """

    def __init__(
        self, step: FlatStep, wanted: StepsPerDispatch, jit: Callable[[FlatStep], FlatStep]
    ):
        if wanted != "auto" and (not isinstance(wanted, int) or wanted < 1):
            raise ValueError(f"steps_per_dispatch must be 'auto' or at least 1, got {wanted!r}.")
        self.n_together: int | None = None if wanted == "auto" else wanted
        self.one = jit(step)
        self._many = jit(_scanned(step))

    def n_next(self, step: int, n_left: int) -> int:
        """How many steps to run next, from the step number and what is left alone.

        Args:
            step: Completed steps.
            n_left: Steps that may be run before something else is due.
        """
        n = self.n_together or 1
        return n if n <= n_left and step % n == 0 else 1

    def program(self, group: list[Any]) -> tuple[FlatStep, Any]:
        """Gives what runs a group of batches, and its argument beside the state."""
        if len(group) == 1:
            return self.one, group[0]
        return self._many, jax.tree.map(_stacked, *group)

    def is_choice_due(self, step: int, n_run: int) -> bool:
        """Tells whether it is time to measure, from numbers of steps alone.

        Args:
            step: Completed steps.
            n_run: How many of them ran since the previous checkpoint.
        """
        return self.n_together is None and step >= _FIRST_STEP and n_run > _N_TOGETHER

    def choose(self, leaves: Leaves, batch: Any) -> str:
        """Measures both ways on copies of a state, takes one, and says so in a line."""
        seconds = self._seconds(leaves, [batch])
        if seconds >= _SHORT_STEP_SECONDS:
            self.n_together = 1
            return f"A step takes {seconds:.1e} s: one goes to the device at a time."
        group = [batch] * _N_TOGETHER
        self._seconds(leaves, group)  # Compiles.
        ratios = []
        while len(ratios) < _N_ROUNDS and not (len(ratios) > 1 and min(ratios) > 2):
            ratios.append(self._seconds(leaves, group) / self._seconds(leaves, [batch]))
        gain = statistics.median(ratios)
        self.n_together = _N_TOGETHER if gain < _GAIN else 1
        return (
            f"{_N_TOGETHER} steps in one dispatch take {gain:.2f} of the time of single ones: "
            f"from here on {self.n_together} at a time."
        )

    def _seconds(self, leaves: Leaves, group: list[Any]) -> float:
        """Seconds per step over a round, the stacking of batches included."""
        leaves = jax.block_until_ready(copied(leaves))
        start = time.perf_counter()
        for _ in range(_N_STEPS_PER_ROUND // len(group)):
            run, batch = self.program(group)
            leaves, _ = run(leaves, batch)
            if time.perf_counter() - start > 1:
                jax.block_until_ready(leaves)
                return 1.0  # Too long by far; no need to know by how much.
        jax.block_until_ready(leaves)
        return (time.perf_counter() - start) / _N_STEPS_PER_ROUND


@jax.jit
def copied(leaves: Leaves) -> Leaves:
    """Copies that a step may take over."""
    return [jnp.copy(x) for x in leaves]


def _scanned(step: FlatStep) -> FlatStep:
    def many(leaves: Leaves, stacked: Any) -> tuple[Leaves, Outputs]:
        leaves, outputs = jax.lax.scan(step, leaves, stacked)
        return leaves, [x[-1] for x in outputs]

    return many


def _stacked(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.Array):
        return jnp.stack(leaves)
    return np.stack(leaves)
