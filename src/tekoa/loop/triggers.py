"""Triggers: small objects that decide at which checkpoints something is due."""

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Protocol

from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.task import StopRequest


class Trigger(Protocol):
    """Decides at which checkpoints something is due."""

    def is_due(self, checkpoint: Checkpoint) -> bool: ...


@dataclasses.dataclass(frozen=True)
class EverySteps:
    """Due if a multiple of `n` was reached or passed since the previous checkpoint."""

    n: int

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"EverySteps needs at least 1 step, got {self.n}.")

    def is_due(self, checkpoint: Checkpoint) -> bool:
        before = checkpoint.step - checkpoint.n_completed_steps
        return checkpoint.step // self.n > before // self.n


@dataclasses.dataclass(frozen=True)
class AtSteps:
    """Due if one of these steps was reached or passed since the previous checkpoint."""

    steps: Collection[int]

    def is_due(self, checkpoint: Checkpoint) -> bool:
        before = checkpoint.step - checkpoint.n_completed_steps
        return any(before < step <= checkpoint.step for step in self.steps)


@dataclasses.dataclass(frozen=True)
class EveryChecks:
    """Due at every n-th check, and at the last step of training.

    Attributes:
        n: Checks from one to the next; 1: all of them.
        steps_per_check: Steps between two checks.
        n_steps: The last step; None if it is not known, and then it may be any step.
        stop_flag: If set, a checkpoint between two checks is one of a stop, and never due.
    """

    n: int
    steps_per_check: int
    n_steps: int | None
    stop_flag: StopRequest | None = None

    def is_due(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.step == self.n_steps:
            return True
        if self.n > 1 or not checkpoint.step % self.steps_per_check:
            return checkpoint.step % (self.n * self.steps_per_check) == 0
        return self.stop_flag is None or not self.stop_flag.is_set()


class EverySeconds:
    """Due when `seconds` have passed since it was last due, or since its creation."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic):
        if seconds <= 0:
            raise ValueError(f"EverySeconds needs a positive time, got {seconds}.")
        self._seconds, self._clock = seconds, clock
        self._last = clock()

    def is_due(self, checkpoint: Checkpoint) -> bool:
        del checkpoint
        now = self._clock()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
