"""Records a profile of chosen steps for TensorBoard or XProf."""

import os

import jax

from tekoa._aliases import accept_aliases
from tekoa.core import files
from tekoa.loop.checkpoint import Checkpoint


class ProfilerTrace:
    """Profiles at least `n_steps` steps, from the first checkpoint at or after `start_step`.

    Recording starts and ends at checkpoints, so it may cover more steps than requested.

    Args:
        directory: Where the profile is written. `output_dir=` is an alias.
        start_step: The earliest step to start from.
        n_steps: The minimum number of steps.
    """

    @accept_aliases(output_dir="directory")
    def __init__(self, directory: str | os.PathLike[str], *, start_step: int, n_steps: int):
        if n_steps < 1:
            raise ValueError(f"n_steps must be 1 or more, got {n_steps}.")
        self._trace = StepTrace(directory, first_step=max(0, start_step) + 1, n_steps=n_steps)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Starts or ends recording if it is time."""
        self._trace(checkpoint.step)
        return checkpoint

    def close(self) -> None:
        """Ends a recording in progress."""
        self._trace.close()


class StepTrace:
    """Profiles steps `first_step` to `first_step + n_steps - 1`.

    A hook for `TrainLoop.before_dispatch`. Unlike `ProfilerTrace` it does not wait for a
    checkpoint, so the profile is short.

    Args:
        directory: Where the profile is written.
        first_step: The first step to record, counted from 1.
        n_steps: Number of steps. Those in one dispatch are recorded together.
    """

    def __init__(self, directory: str | os.PathLike[str], *, first_step: int, n_steps: int):
        if first_step < 1 or n_steps < 1:
            raise ValueError(
                f"first_step and n_steps must be 1 or more, got {first_step} and {n_steps}."
            )
        self._directory = str(files.local_path(directory))
        self._start, self._n_steps = first_step - 1, n_steps
        self._end: int | None = None
        self._is_done = False

    def __call__(self, step: int) -> None:
        """Starts or ends recording if it is time; `step` is the number of completed steps."""
        if self._end is not None:
            if step >= self._end:
                self.close()
        elif not self._is_done and step >= self._start:
            # Earlier steps may still be running.
            jax.block_until_ready(jax.live_arrays())
            jax.profiler.start_trace(self._directory)
            self._end = step + self._n_steps

    def close(self) -> None:
        """Ends a recording in progress."""
        if self._end is not None:
            jax.block_until_ready(jax.live_arrays())
            jax.profiler.stop_trace()
            self._end, self._is_done = None, True
