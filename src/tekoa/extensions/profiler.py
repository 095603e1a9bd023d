"""Records a trace of chosen steps for TensorBoard or XProf."""

import os

import jax

from tekoa.loop.checkpoint import Checkpoint


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
