"""Chooses how many steps go into one dispatch, by measuring on the running program.

A small model spends much of a step on its dispatch; several steps in one `lax.scan` save that. For
other models a scan gains nothing. So both are measured on a copy of the state, and the choice is
stored with the run: a resumed run reuses it, since the two may differ in the last bit. For the same
reason the moment of measuring depends on the number of steps alone. Convolutions on CPU are not
measured: in a scan they are ten times slower.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.loop.engine.flat_state import FlatStep, Leaves

StepsPerDispatch = int | Literal["auto"]

# A run of fewer short steps ends before a second program would pay for its compilation.
_FIRST_STEP = 1000
_CANDIDATES = range(8, 17)
# Above this a step is too long for the cost of its dispatch to matter.
_SHORT_STEP_SECONDS = 1.5e-3
# A scan must gain clearly, or noise would choose it.
_MAX_RATIO = 0.95
_N_ROUNDS = 5
_N_GROUPS_PER_ROUND = 5
# CPU programs read a numpy array in place if it is aligned, and copy it otherwise.
_ALIGNMENT = 64


class Dispatcher:
    """Runs steps one by one or several at a time.

    Args:
        step: The step over lists of arrays.
        many_steps: The same for several stacked batches.
        steps_per_dispatch: Steps per dispatch, or "auto" to measure.
        jit: Compiles a function that consumes its first argument.

    Attributes:
        steps_per_dispatch: Steps per dispatch; None until "auto" has measured.
        one: The compiled step.
        many: The compiled function for several steps.
    """

    def __init__(
        self,
        step: FlatStep,
        many_steps: FlatStep,
        *,
        steps_per_dispatch: StepsPerDispatch,
        jit: Callable[[FlatStep], FlatStep],
    ):
        is_auto = steps_per_dispatch == "auto"
        if not is_auto and (not isinstance(steps_per_dispatch, int) or steps_per_dispatch < 1):
            raise ValueError(
                f"steps_per_dispatch must be 'auto' or at least 1, got {steps_per_dispatch!r}."
            )
        self.steps_per_dispatch: int | None = None if is_auto else steps_per_dispatch
        self.one, self.many = jit(step), jit(many_steps)
        self._step = step

    def n_next(self, n_done: int, n_left: int) -> int:
        """Returns how many steps to run next, from numbers of steps alone.

        Args:
            n_done: Steps since the last one on which a regular checkpoint falls.
            n_left: Steps that may run before something else is due.
        """
        n = self.steps_per_dispatch or 1
        return n if n <= n_left and n_done % n == 0 else 1

    def program(self, group: list[Any]) -> tuple[FlatStep, Any]:
        """Returns the program that runs a group of batches, and its second argument."""
        if len(group) == 1:
            return self.one, group[0]
        return self.many, stack_batches(group)

    def is_choice_due(self, step: int, n_steps: int) -> bool:
        """Whether it is time to measure, from numbers of steps alone.

        Args:
            step: Completed steps.
            n_steps: How many of them ran since the previous checkpoint.
        """
        return self.steps_per_dispatch is None and is_choice_due(step, n_steps)

    def choose(self, leaves: Leaves, batch: Any, n_steps: int) -> str:
        """Measures single and grouped steps on copies of a state, and adopts the faster.

        Args:
            leaves: The state.
            batch: A batch.
            n_steps: Steps between two checkpoints; groups are sized to leave few single steps.

        Returns:
            A line that reports the choice.
        """
        self.steps_per_dispatch, line = self._measure(leaves, batch, n_steps)
        return line

    def _measure(self, leaves: Leaves, batch: Any, n_steps: int) -> tuple[int, str]:
        if jax.default_backend() == "cpu" and self._has_convolution(leaves, batch):
            return 1, "Running 1 step per dispatch: convolutions are slow in a scan on CPU."
        n = max(_CANDIDATES, key=lambda n: ((n_steps - 1) // n * n, n))
        n_measured = _N_GROUPS_PER_ROUND * n
        seconds = self._seconds(leaves, [batch], n_measured)
        if seconds >= _SHORT_STEP_SECONDS:
            return 1, f"Running 1 step per dispatch: a step takes {1e3 * seconds:.2g} ms."
        group = [batch] * n
        with compiling(self.many):
            self._seconds(leaves, group, n_measured)
        ratios = []
        while len(ratios) < _N_ROUNDS and not (len(ratios) > 1 and min(ratios) > 2):
            single = self._seconds(leaves, [batch], n_measured)
            ratios.append(self._seconds(leaves, group, n_measured) / single)
        ratio = f"{statistics.median(ratios):.2f}x the time of single steps"
        if statistics.median(ratios) >= _MAX_RATIO:
            return 1, f"Running 1 step per dispatch ({n} take {ratio})."
        return n, f"Running {n} steps per dispatch ({ratio})."

    def _has_convolution(self, leaves: Leaves, batch: Any) -> bool:
        # The text of a program includes the functions that it calls.
        return "conv_general_dilated" in str(jax.make_jaxpr(self._step)(leaves, batch))

    def _seconds(self, leaves: Leaves, group: list[Any], n_steps: int) -> float:
        """Returns the seconds per step over a round, including the stacking of batches."""
        leaves = jax.block_until_ready(copy_leaves(leaves))
        start = time.perf_counter()
        for i in range(n_steps // len(group)):
            run, batch = self.program(group)
            leaves, outputs = run(leaves, batch)
            if i == 0:
                jax.block_until_ready(outputs)
            if time.perf_counter() - start > 1:
                jax.block_until_ready(leaves)
                return 1.0  # Far too long; the exact value does not matter.
        jax.block_until_ready(leaves)
        return (time.perf_counter() - start) / n_steps


def is_choice_due(step: int, n_steps: int) -> bool:
    """Whether a run that has not chosen yet does so at a checkpoint; see `Dispatcher`."""
    return step >= _FIRST_STEP and n_steps > min(_CANDIDATES)


@contextlib.contextmanager
def compiling(program: Any) -> Iterator[None]:
    """Surrounds the first call of a compiled function.

    If that call does not return, JAX runs all later ones in Python, which is slower and where an
    interrupt may lose their results. So the function is made to compile again.
    """
    try:
        yield
    except BaseException:
        program.clear_cache()
        raise


@jax.jit
def copy_leaves(leaves: Leaves) -> Leaves:
    """Copies arrays so that a step may consume them."""
    return [jnp.copy(x) for x in leaves]


def stack_batches(batches: list[Any]) -> Any:
    """Stacks several batches along a new leading axis."""
    return jax.tree.map(_stack, *batches)


def _stack(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.Array):
        return jnp.stack(leaves)
    first = np.asarray(leaves[0])
    return np.stack(leaves, out=_empty_aligned((len(leaves), *first.shape), first.dtype))


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    n_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + n_bytes].view(dtype).reshape(shape)
