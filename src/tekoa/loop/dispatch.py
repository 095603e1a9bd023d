"""How many steps go into one dispatch, chosen by measuring on the running program.

A small model spends much of a step in handing it to the device; several steps in one
`lax.scan` save that. For others a scan is no gain. So it is tried, on a copy of the state,
and what was chosen is a fact of the run: a resumed run reuses it, since the two ways may
differ in the last bit. When it is tried depends on the number of steps alone, for the same
reason. Convolutions on CPU are not tried: in a scan they are ten times slower.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.loop.flat import FlatStep, Leaves

StepsPerDispatch = int | Literal["auto"]

# A run of fewer short steps ends before a second program would pay for its compilation.
_FIRST_STEP = 1000
_N_TOGETHER = range(8, 17)
# Above this a step is too long for the cost of its dispatch to matter.
_SHORT_STEP_SECONDS = 1.5e-3
# A scan must pay clearly, or noise would choose it.
_GAIN = 0.95
_N_ROUNDS = 5
_N_GROUPS_PER_ROUND = 5
# CPU programs read a numpy array as it is where it starts so, and else copy it first.
_ALIGNMENT = 64


class Dispatcher:
    """Runs steps one by one or several at a time.

    Args:
        step: The step over lists of arrays.
        many: The same for several batches, stacked.
        wanted: Steps per dispatch, or "auto".
        jit: Compiles a function that takes over its first argument.

    Attributes:
        n_together: Steps per dispatch; None until "auto" has measured.
    """

    def __init__(
        self,
        step: FlatStep,
        many: FlatStep,
        *,
        wanted: StepsPerDispatch,
        jit: Callable[[FlatStep], FlatStep],
    ):
        if wanted != "auto" and (not isinstance(wanted, int) or wanted < 1):
            raise ValueError(f"steps_per_dispatch must be 'auto' or at least 1, got {wanted!r}.")
        self.n_together: int | None = None if wanted == "auto" else wanted
        self.one = jit(step)
        self._step = step
        self._many = jit(many)

    def n_next(self, n_run: int, n_left: int) -> int:
        """How many steps to run next, from numbers of steps alone.

        Args:
            n_run: Steps since the last one on which a checkpoint falls.
            n_left: Steps that may be run before something else is due.
        """
        n = self.n_together or 1
        return n if n <= n_left and n_run % n == 0 else 1

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
        return self.n_together is None and step >= _FIRST_STEP and n_run > min(_N_TOGETHER)

    def choose(self, leaves: Leaves, batch: Any, n_run: int) -> str:
        """Measures both ways on copies of a state, takes one, and says so in a line.

        Args:
            leaves: The state.
            batch: A batch.
            n_run: Steps from checkpoint to checkpoint: as few as can be are left single.
        """
        if jax.default_backend() == "cpu" and self._has_convolution(leaves, batch):
            self.n_together = 1
            return "Convolutions are slow in a scan on CPU: one step goes to it at a time."
        n = max(_N_TOGETHER, key=lambda n: ((n_run - 1) // n * n, n))
        n_steps = _N_GROUPS_PER_ROUND * n
        seconds = self._seconds(leaves, [batch], n_steps)
        if seconds >= _SHORT_STEP_SECONDS:
            self.n_together = 1
            return f"A step takes {1e3 * seconds:.2g} ms: one goes to the device at a time."
        group = [batch] * n
        self._seconds(leaves, group, n_steps)  # Compiles.
        ratios = []
        while len(ratios) < _N_ROUNDS and not (len(ratios) > 1 and min(ratios) > 2):
            alone = self._seconds(leaves, [batch], n_steps)
            ratios.append(self._seconds(leaves, group, n_steps) / alone)
        gain = statistics.median(ratios)
        self.n_together = n if gain < _GAIN else 1
        return (
            f"{n} steps in one dispatch take {gain:.2f} of the time of single ones: "
            f"from here on {self.n_together} at a time."
        )

    def _has_convolution(self, leaves: Leaves, batch: Any) -> bool:
        # The text of a program tells of the functions that it calls too.
        return "conv_general_dilated" in str(jax.make_jaxpr(self._step)(leaves, batch))

    def _seconds(self, leaves: Leaves, group: list[Any], n_steps: int) -> float:
        """Seconds per step over a round, the stacking of batches included."""
        leaves = jax.block_until_ready(copied(leaves))
        start = time.perf_counter()
        for i in range(n_steps // len(group)):
            run, batch = self.program(group)
            leaves, outputs = run(leaves, batch)
            if i == 0:
                jax.block_until_ready(outputs)
            if time.perf_counter() - start > 1:
                jax.block_until_ready(leaves)
                return 1.0  # Too long by far; no need to know by how much.
        jax.block_until_ready(leaves)
        return (time.perf_counter() - start) / n_steps


@jax.jit
def copied(leaves: Leaves) -> Leaves:
    """Copies that a step may take over."""
    return [jnp.copy(x) for x in leaves]


def _stacked(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.Array):
        return jnp.stack(leaves)
    first = np.asarray(leaves[0])
    return np.stack(leaves, out=_aligned((len(leaves), *first.shape), first.dtype))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    n_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + n_bytes].view(dtype).reshape(shape)
