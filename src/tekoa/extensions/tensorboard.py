"""SummaryWriter: metrics as TensorBoard scalars, each point once also after a resume.

Every start writes a mark that tells TensorBoard to forget the points of an earlier run
that lie after the step from which this one goes on. Points are on disk when the stage
returns: put it before the writer of checkpoints, and no committed step lacks its points.
"""

import os
import pathlib
import time
from typing import Any

import jax.numpy as jnp

from tekoa.core import trees
from tekoa.loop.checkpoint import Checkpoint, as_summary


class SummaryWriter:
    """Writes each metric as the scalar `group/name`.

    Args:
        output_dir: Where the event files go; made if it does not exist.
        params: If true, also the root mean square of every parameter, as
            `params/NAME SHAPE`.
    """

    def __init__(self, output_dir: str | os.PathLike[str], *, params: bool = False):
        self._directory = pathlib.Path(output_dir)
        self._with_params = params
        self._writer: Any = None

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the points of one checkpoint, to disk."""
        if self._writer is None:
            self._writer = self._opened(checkpoint.step - checkpoint.n_completed_steps)
        for group, values in as_summary(checkpoint).metrics.items():
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, checkpoint.step)
        if self._with_params:
            for name, leaf in trees.flatten_named(checkpoint.model_params).items():
                tag = f"params/{name} {tuple(leaf.shape)}"
                rms = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
                self._writer.add_scalar(tag, float(rms), checkpoint.step)
        self._writer.flush()
        return checkpoint

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self, start_step: int) -> Any:
        import tensorboardX

        is_resumed = any(self._directory.glob("events.out.tfevents.*"))
        return tensorboardX.SummaryWriter(
            str(self._directory),
            purge_step=start_step + 1 if is_resumed else None,
            # Two starts within one second must not share a file, and must keep their order.
            filename_suffix=f".{time.time_ns()}",
        )
