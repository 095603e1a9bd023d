"""TensorBoardWriter: writes metrics as TensorBoard scalars, without duplicates after a resume.

The metrics come with the checkpoint: groups "train" and "rates" from `loop/train_metrics.py`, one
group per `EvalLoop`.

Points are written in the background; see `outbox.py`. Place the stage before the checkpoint writer:
a step is committed only after its points are on disk, so that no committed step lacks them.

Every start writes a mark that makes TensorBoard discard the points of an earlier run after the step
from which this one resumes. TensorBoard reads event files in the order of their names.

A point names what it belongs to (see `Point.commit`): an evaluated commit by its digest. A point of
training is written before its step is committed, so it names the start of the program instead:
together with the step, it is the commit whose manifest names the same start.
"""

import math
import os
import pathlib
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from tekoa import _extras, hosts
from tekoa._aliases import accept_aliases
from tekoa.core import files, trees
from tekoa.core.trees import PyTree
from tekoa.extensions import outbox
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.loop.media import Histogram, Media, Text, png
from tekoa.store.commit import fault_points, identity

PREFIX = "events.out.tfevents."
START = "start:"

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
        self._step: int | None = None

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Starts writing the points of one checkpoint."""
        # At the start, and when a loop in this process returns to an earlier step.
        if self._step is None or checkpoint.step <= self._step:
            first = checkpoint.step - max(1, checkpoint.n_completed_steps) + 1
            self._writer.discard_from(first)
        self._step = checkpoint.step
        summary = as_summary(checkpoint)
        values = summary.scalars
        if self._has_params:
            values |= _root_mean_squares(checkpoint.model_params)
        commit = f"{START}{identity.start_id()}"
        self._writer.add(values, checkpoint.step, commit=commit)
        self._writer.add_media(summary.media, checkpoint.step)
        return checkpoint

    def discard_after(self, step: int) -> None:
        """Discards the points of later steps: training has returned to this one."""
        self._writer.discard_from(step + 1)

    def flush(self) -> bool:
        """Waits until all points are on disk; returns whether they are."""
        return self._writer.flush()

    def close(self) -> None:
        """Writes the remaining points and closes the event file."""
        self._writer.close()


SummaryWriter = TensorBoardWriter


def _root_mean_squares(params: PyTree) -> dict[str, float]:
    named = trees.flatten_named(params)
    sizes = [max(1, leaf.size) for leaf in named.values()]
    squares = jax.device_get(_sums_of_squares(list(named.values())))
    tags = [f"params/{name} {tuple(leaf.shape)}" for name, leaf in named.items()]
    return {tag: math.sqrt(x / n) for tag, x, n in zip(tags, squares, sizes, strict=True)}


class Point(NamedTuple):
    """One value of a curve."""

    tag: str
    value: float
    step: int
    wall_time: float  # Seconds since 1970.
    # Digest of the commit that was measured; START and `CommitId.start` if it is not made yet.
    commit: str = ""


class MediaPoint(NamedTuple):
    """A text, a histogram or an image of one step."""

    tag: str
    media: Media
    step: int
    wall_time: float  # Seconds since 1970.


class Mark(NamedTuple):
    """Makes readers discard all points so far whose step is `step` or higher."""

    step: int
    wall_time: float


Record = Point | MediaPoint | Mark


class ScalarWriter:
    """Writes scalars to a new event file in the background, in process 0 only.

    Args:
        directory: Directory of the event file; created if necessary.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        directory = files.local_path(directory)
        self._outbox: outbox.Outbox | None = None
        if hosts.current().is_writer:
            name = f"TensorBoard files in {directory}"
            self._outbox = outbox.Outbox(EventFile(directory), name=name)

    def discard_from(self, step: int) -> None:
        """Discards all points so far, in earlier files too, whose step is `step` or higher."""
        self._put([Mark(step, time.time())])

    def add(
        self,
        values: Mapping[str, float],
        step: int,
        *,
        commit: str = "",
        wall_time: float | None = None,
    ) -> None:
        """Adds one point per tag; a tag may be any text: `params/Dense_0/kernel (256, 10)`."""
        now = time.time() if wall_time is None else wall_time
        self._put([Point(tag, float(x), step, now, commit) for tag, x in values.items()])

    def add_media(self, media: Mapping[str, Media], step: int) -> None:
        """Adds texts, histograms and images, by tag."""
        now = time.time()
        self._put([MediaPoint(tag, value, step, now) for tag, value in media.items()])

    def _put(self, records: Sequence[Record]) -> None:
        if self._outbox is not None and records:
            self._outbox.put(records)

    def flush(self) -> bool:
        """Waits until all points are on disk; returns whether they are."""
        return self._outbox is None or self._outbox.flush()

    def close(self) -> None:
        """Writes the remaining points; the writer cannot be used afterwards."""
        if self._outbox is not None:
            self._outbox.close()


class EventFile:
    """A new event file, as a sink for an `Outbox`; opened by the first write.

    Args:
        directory: Directory of the file; created if necessary.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        self._file: BinaryIO | None = None
        self._n_bytes = 0

    def write(self, records: Sequence[Record]) -> None:
        """Appends points and marks; a failed attempt leaves no part of a record behind."""
        if self._file is None:
            self._open()
        assert self._file is not None
        header = [] if self._n_bytes else [_version()]
        data = memoryview(b"".join([*header, *map(_encode, records)]))
        n_written = 0
        try:
            while n_written < len(data):
                n_written += self._file.write(data[n_written:])
        except OSError:
            self._undo()
            raise
        self._n_bytes += n_written

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / _new_name(self._directory)
        # Unbuffered: what was written survives the end of the process.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._close = weakref.finalize(self, self._file.close)
        self._n_bytes = 0

    def _undo(self) -> None:
        assert self._file is not None
        try:
            self._file.truncate(self._n_bytes)
            self._file.seek(self._n_bytes)
        except OSError:
            # Readers skip the end of this file; the next attempt starts another one.
            self.close()

    def sync(self) -> None:
        """Forces the file to disk."""
        if self._file is not None:
            fault_points.reach("before_tb_flush")
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._close()
            self._file = None


def _new_name(directory: pathlib.Path) -> str:
    """Returns a name that sorts after those of all event files, even if the clock was set back."""
    now = time.time_ns()
    newest = max((path.name for path in directory.glob(f"{PREFIX}*")), default="")
    seconds = now // 10**9
    # Two starts within one second must not share a file, and must keep their order.
    suffix = f"{socket.gethostname()}.{now}"
    if f"{PREFIX}{seconds}.{suffix}" <= newest:
        newest_seconds = newest.removeprefix(PREFIX).partition(".")[0]
        if not (newest_seconds.isascii() and newest_seconds.isdigit()):
            return f"{newest}.{suffix}"
        seconds = int(newest_seconds) + 1
    return f"{PREFIX}{seconds}.{suffix}"


def _version() -> bytes:
    return _record(_proto("event").Event(file_version="brain.Event:2", wall_time=time.time()))


def _encode(record: Record) -> bytes:
    event_pb2, summary_pb2 = _proto("event"), _proto("summary")
    event = event_pb2.Event(step=record.step, wall_time=record.wall_time)
    if isinstance(record, Mark):
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        event.session_log.CopyFrom(start)
    elif isinstance(record, MediaPoint):
        value = _media_value(record.media)
        value.tag = record.tag
        event.summary.CopyFrom(summary_pb2.Summary(value=[value]))
    else:
        # TensorBoard ignores `node_name`.
        value = summary_pb2.Summary.Value(
            tag=record.tag, simple_value=record.value, node_name=record.commit
        )
        event.summary.CopyFrom(summary_pb2.Summary(value=[value]))
    return _record(event)


def _media_value(media: Media) -> Any:
    """Returns what the plugins of TensorBoard read."""
    summary_pb2 = _proto("summary")
    if isinstance(media, Text):
        string_type, value = _proto("types").DT_STRING, media.value.encode()
        tensor = _proto("tensor").TensorProto(dtype=string_type, string_val=[value])
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
        return summary_pb2.Summary.Value(tensor=tensor, metadata=metadata)
    if isinstance(media, Histogram):
        counts, edges = np.asarray(media.counts, float), np.asarray(media.edges, float)
        centers = (edges[1:] + edges[:-1]) / 2
        histogram = summary_pb2.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=counts.sum(),
            sum=(counts * centers).sum(),
            sum_squares=(counts * centers**2).sum(),
            bucket_limit=edges[1:],
            bucket=counts,
        )
        return summary_pb2.Summary.Value(histo=histogram)
    height, width, n_channels = media.bytes.shape
    image = summary_pb2.Summary.Image(
        height=height, width=width, colorspace=n_channels, encoded_image_string=png(media)
    )
    return summary_pb2.Summary.Value(image=image)


def _record(event: Any) -> bytes:
    """Returns an event as a record: length, its checksum, data, checksum of the data."""
    # tensorboardX's own writers keep points in memory, or wait for the disk.
    masked_crc32c = _extras.import_inside("tensorboardX.record_writer").masked_crc32c
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, data))


def _proto(name: str) -> Any:
    """Returns a protobuf module; its classes are created at import and have no types."""
    return _extras.import_inside(f"tensorboardX.proto.{name}_pb2")
