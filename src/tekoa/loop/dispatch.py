"""How many steps go into one dispatch, chosen by measuring on the running program.

A small model spends much of a step in handing it to the device; several steps in one
`lax.scan` save that. For others a scan is no gain, and on CPU convolutions in a scan are
many times slower. So it is tried, on real steps, and what was chosen is a fact of the run:
a resumed run reuses it, since the two ways may differ in the last bit.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core.state import StepOutput, TrainState
from tekoa.core.step import Step

StepsPerDispatch = int | Literal["auto"]

# Above this a step is too long for the cost of its dispatch to matter.
_SHORT_STEP_SECONDS = 1.5e-3
_N_TOGETHER = 16
# A scan must pay clearly, or noise would choose it.
_GAIN = 0.95


class Dispatcher:
    """Runs steps one by one or several at a time.

    Attributes:
        n_together: Steps per dispatch once chosen; None while "auto" is still measuring.
    """

    def __init__(self, step: Step, wanted: StepsPerDispatch):
        if wanted != "auto" and (not isinstance(wanted, int) or wanted < 1):
            raise ValueError(f"steps_per_dispatch must be 'auto' or at least 1, got {wanted!r}.")
        self.n_together: int | None = None if wanted == "auto" else wanted
        self.one = jax.jit(step, donate_argnums=0)
        self._many = jax.jit(_scanned(step), donate_argnums=0)
        self._trial = _Trial()

    def n_next(self, step: int, n_left: int) -> int:
        """How many steps to run next, from the step number and what is left alone.

        Args:
            step: Completed steps.
            n_left: Steps that may be run before something else is due.
        """
        n = self.n_together or self._trial.n_together
        return n if step % n == 0 and n <= n_left else 1

    def run(self, state: TrainState, group: list[Any]) -> tuple[TrainState, StepOutput]:
        """Runs one step per batch of the group."""
        if self.n_together is None:
            self._trial.before(state, len(group))
        if len(group) == 1:
            result = self.one(state, group[0])
        else:
            result = self._many(state, jax.tree.map(_stacked, *group))
        if self.n_together is None:
            self.n_together = self._trial.after(result, len(group))
        return result


@dataclasses.dataclass(frozen=True)
class _Lap:
    n_together: int
    n_dispatches: int
    is_timed: bool


class _Trial:
    """Times a stretch of single steps, then, if they are short, of several at once.

    Within a stretch the host runs ahead as it always does; the time includes the data.
    """

    def __init__(self):
        n = _N_TOGETHER
        self._laps = [_Lap(1, 3, False), _Lap(1, 32, True), _Lap(n, 1, False), _Lap(n, 4, True)]
        self._seconds: dict[int, float] = {}
        self._n_done = 0
        self._start = 0.0

    @property
    def n_together(self) -> int:
        return self._laps[0].n_together

    def before(self, state: TrainState, n: int) -> None:
        if self._n_done == 0 and n == self.n_together:
            jax.block_until_ready(state)
            self._start = time.perf_counter()

    def after(self, result: Any, n: int) -> int | None:
        """Gives the choice once it is made."""
        if n != self.n_together:
            self._n_done = 0  # Steps between two stretches spoil the time.
            return None
        self._n_done += 1
        lap = self._laps[0]
        if self._n_done < lap.n_dispatches:
            return None
        jax.block_until_ready(result)
        if lap.is_timed:
            self._seconds[n] = (time.perf_counter() - self._start) / (n * lap.n_dispatches)
        self._n_done = 0
        if len(self._laps) > 1:
            self._laps.pop(0)
            is_short = self._seconds.get(1, 0.0) < _SHORT_STEP_SECONDS
            return None if is_short else 1
        return n if self._seconds[n] < _GAIN * self._seconds[1] else 1


def _scanned(step: Step) -> Callable[[TrainState, Any], tuple[TrainState, StepOutput]]:
    def many(state: TrainState, stacked: Any) -> tuple[TrainState, StepOutput]:
        state, outputs = jax.lax.scan(step, state, stacked)
        return state, jax.tree.map(lambda x: x[-1], outputs)

    return many


def _stacked(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.Array):
        return jnp.stack(leaves)
    return np.stack(leaves)
