"""Records a trace of chosen steps for TensorBoard or XProf."""

import os
from collections.abc import Callable

import jax

from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.task import StopFlag


class ProfilerTrace:
    """Traces from the first checkpoint at or after `start_step` for `n_steps` steps.

    Tracing starts and ends at checkpoints, so it may cover more steps than asked for.

    Args:
        output_dir: Where the trace goes.
        start_step: The earliest step to trace from.
        n_steps: How many steps at least.
    """

    def __init__(self, output_dir: str | os.PathLike[str], *, start_step: int, n_steps: int):
        if n_steps < 1:
            raise ValueError(f"n_steps must be 1 or more, got {n_steps}.")
        self._directory = os.fspath(output_dir)
        self._start_step, self._n_steps = start_step, n_steps
        self._traced_from: int | None = None
        self._is_done = False

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Starts or ends the trace where it is time."""
        if self._traced_from is not None:
            if checkpoint.step >= self._traced_from + self._n_steps:
                self.close()
        elif not self._is_done and checkpoint.step >= self._start_step:
            self._traced_from = checkpoint.step
            jax.profiler.start_trace(self._directory)
        return checkpoint

    def close(self) -> None:
        """Ends a trace that is being recorded."""
        if self._traced_from is not None:
            jax.profiler.stop_trace()
            self._traced_from, self._is_done = None, True


class StepTrace:
    """A stop flag that traces chosen steps: loops look at their flag before each dispatch.

    Unlike `ProfilerTrace` it need not wait for a checkpoint, so the trace is short.

    Args:
        output_dir: Where the trace goes.
        first_step: The first step to trace; 1 is the first of all.
        n_steps: How many steps. Several in one dispatch are traced together.
        stop_flag: What tells whether to stop.

    Attributes:
        step: Gives the loop's completed steps; to be set once there is a loop.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        first_step: int,
        n_steps: int,
        stop_flag: StopFlag,
    ):
        if first_step < 1 or n_steps < 1:
            raise ValueError(
                f"first_step and n_steps must be 1 or more, got {first_step} and {n_steps}."
            )
        self._directory, self._stop_flag = os.fspath(output_dir), stop_flag
        self._first_step, self._n_steps = first_step, n_steps
        self._traced_from: int | None = None
        self._is_done = False
        self.step: Callable[[], int] | None = None

    def is_set(self) -> bool:
        """Starts or ends the trace where it is time; tells whether to stop."""
        if self.step is not None and not self._is_done:
            self._look(self.step())
        return self._stop_flag.is_set()

    def _look(self, n_done: int) -> None:
        if self._traced_from is None and n_done >= self._first_step - 1:
            # Steps before it may still be running.
            jax.block_until_ready(jax.live_arrays())
            jax.profiler.start_trace(self._directory)
            self._traced_from = n_done
        elif self._traced_from is not None and n_done >= self._traced_from + self._n_steps:
            self.close()

    def close(self) -> None:
        """Ends a trace that is being recorded."""
        if self._traced_from is not None and not self._is_done:
            jax.block_until_ready(jax.live_arrays())
            jax.profiler.stop_trace()
            self._is_done = True
