"""SummaryWriter: metrics as TensorBoard scalars, each point once also after a resume.

Every start writes a mark that tells TensorBoard to forget the points of an earlier run
that lie after the step from which this one goes on. Points are in the file when the stage
returns: put it before the writer of checkpoints, and no step that a killed process has
committed lacks its points. What checkpoints less than a second apart have written may be
lost with the whole machine: waiting for the disk costs as much as ten short steps.
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

from tekoa.core import hosts, trees
from tekoa.core.trees import PyTree
from tekoa.loop.checkpoint import Checkpoint, as_summary

_SECONDS_PER_SYNC = 1.0

_sums_of_squares = jax.jit(trees.sums_of_squares)


class SummaryWriter:
    """Writes each metric as the scalar `group/name`.

    Args:
        output_dir: Where the event files go; made if it does not exist.
        params: If true, also the root mean square of every parameter, as
            `params/NAME SHAPE`.
    """

    def __init__(self, output_dir: str | os.PathLike[str], *, params: bool = False):
        self._points = PointWriter(output_dir)
        self._with_params = params

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the points of one checkpoint."""
        self._points.go_on_from(checkpoint.step - max(1, checkpoint.n_completed_steps))
        for group, values in as_summary(checkpoint).metrics.items():
            for name, value in values.items():
                self._points.add(f"{group}/{name}", value, checkpoint.step)
        if self._with_params:
            for tag, scale in _scales(checkpoint.model_params).items():
                self._points.add(tag, scale, checkpoint.step)
        self._points.flush()
        return checkpoint

    def close(self) -> None:
        """Closes the event file."""
        self._points.close()


def _scales(params: PyTree) -> dict[str, float]:
    named = trees.flatten_named(params)
    sizes = [max(1, leaf.size) for leaf in named.values()]
    squares = jax.device_get(_sums_of_squares(list(named.values())))
    tags = [f"params/{name} {tuple(leaf.shape)}" for name, leaf in named.items()]
    return {tag: math.sqrt(x / n) for tag, x, n in zip(tags, squares, sizes, strict=True)}


class PointWriter:
    """Writes scalars to an event file of its own; of several processes only process 0 does.

    Args:
        output_dir: Where the event file goes; made if it does not exist.
    """

    def __init__(self, output_dir: str | os.PathLike[str]):
        self._directory = pathlib.Path(output_dir)
        self._is_writer = hosts.current().is_writer
        self._file: Any = None
        self._synced = 0.0

    def go_on_from(self, step: int) -> None:
        """Opens the file, once; points of earlier files after `step` are forgotten."""
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
        """Adds one point, under the very name given: `params/Dense_0/kernel (256, 10)`."""
        if not self._is_writer:
            return
        event_pb2, summary_pb2 = _protos()
        point = summary_pb2.Summary.Value(tag=tag, simple_value=value)
        self._write(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[point])))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        # Not by tensorboardX's writers: they keep points in memory, or wait for the disk.
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        for part in (length, data):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))

    def flush(self) -> None:
        """Puts all points into the file, and from time to time the file on the disk."""
        if not self._is_writer:
            return
        self._file.flush()
        if time.monotonic() - self._synced > _SECONDS_PER_SYNC:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Closes the file; a next point would need a new writer."""
        if self._file is not None:
            self._close()
            self._file = None


def _protos() -> tuple[Any, Any]:
    """The modules of messages: their classes are made at the import, and have no types."""
    from tensorboardX.proto import event_pb2, summary_pb2

    return event_pb2, summary_pb2
