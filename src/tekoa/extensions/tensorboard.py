"""TensorBoardWriter: writes metrics as TensorBoard scalars, without duplicates after a resume.

The metrics come with the checkpoint: groups "train" and "rates" from `loop/train_metrics.py`, one
group per `EvalLoop`.

Every start writes a mark that makes TensorBoard discard the points of an earlier run after the step
from which this one resumes. Points are in the file when the stage returns: place it before the
checkpoint writer, and every step that a killed process has committed has its points. Points of
checkpoints less than a second apart may be lost if the machine crashes: waiting for the disk takes
as long as ten short steps.
"""

import math
import os
import pathlib
import socket
import struct
import time
import weakref
from typing import Any

import jax

from tekoa import hosts
from tekoa._aliases import accept_aliases
from tekoa.core import trees
from tekoa.core.trees import PyTree
from tekoa.loop.checkpoint import Checkpoint, as_summary

_SECONDS_PER_SYNC = 1.0

_sums_of_squares = jax.jit(trees.sums_of_squares)


class TensorBoardWriter:
    """Writes each metric as the scalar `group/name`.

    Args:
        directory: Directory of the event files; created if necessary. `output_dir=` is an alias.
        params: Whether to write the root mean square of every parameter, as `params/NAME SHAPE`.
    """

    @accept_aliases(output_dir="directory")
    def __init__(self, directory: str | os.PathLike[str], *, params: bool = False):
        self._writer = ScalarWriter(directory)
        self._has_params = params

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the points of one checkpoint."""
        self._writer.resume_from(checkpoint.step - max(1, checkpoint.n_completed_steps))
        for group, values in as_summary(checkpoint).metrics.items():
            for name, value in values.items():
                self._writer.add(f"{group}/{name}", value, checkpoint.step)
        if self._has_params:
            for tag, value in _root_mean_squares(checkpoint.model_params).items():
                self._writer.add(tag, value, checkpoint.step)
        self._writer.flush()
        return checkpoint

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


SummaryWriter = TensorBoardWriter


def _root_mean_squares(params: PyTree) -> dict[str, float]:
    named = trees.flatten_named(params)
    sizes = [max(1, leaf.size) for leaf in named.values()]
    squares = jax.device_get(_sums_of_squares(list(named.values())))
    tags = [f"params/{name} {tuple(leaf.shape)}" for name, leaf in named.items()]
    return {tag: math.sqrt(x / n) for tag, x, n in zip(tags, squares, sizes, strict=True)}


class ScalarWriter:
    """Writes scalars to a new event file, in process 0 only.

    Args:
        directory: Directory of the event file; created if necessary.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        self._is_writer = hosts.current().is_writer
        self._file: Any = None
        self._synced = 0.0

    def resume_from(self, step: int) -> None:
        """Opens the file, once; points of earlier files after `step` are discarded."""
        if self._file is not None or not self._is_writer:
            return
        event_pb2, _ = _protos()
        self._directory.mkdir(parents=True, exist_ok=True)
        is_resumed = any(self._directory.glob("events.out.tfevents.*"))
        # Two starts within one second must not share a file, and must keep their order.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        self._file = open(self._directory / name, "wb")  # noqa: SIM115
        self._close = weakref.finalize(self, self._file.close)
        self._write(event_pb2.Event(file_version="brain.Event:2"))
        if is_resumed:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(step=step + 1, session_log=start))

    def add(self, tag: str, value: float, step: int) -> None:
        """Adds one point; the tag may be any text: `params/Dense_0/kernel (256, 10)`."""
        if not self._is_writer:
            return
        event_pb2, summary_pb2 = _protos()
        point = summary_pb2.Summary.Value(tag=tag, simple_value=value)
        self._write(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[point])))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        # tensorboardX's own writers keep points in memory, or wait for the disk.
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        for part in (length, data):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))

    def flush(self) -> None:
        """Flushes all points to the file, and syncs the file to disk from time to time."""
        if not self._is_writer:
            return
        self._file.flush()
        if time.monotonic() - self._synced > _SECONDS_PER_SYNC:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Closes the file; the writer cannot be used afterwards."""
        if self._file is not None:
            self._close()
            self._file = None


def _protos() -> tuple[Any, Any]:
    """Returns the protobuf modules; their classes are created at import and have no types."""
    from tensorboardX.proto import event_pb2, summary_pb2

    return event_pb2, summary_pb2
