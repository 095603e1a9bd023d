"""Reads the scalars of TensorBoard files, without TensorBoard.

As in TensorBoard, a restart of the program drops earlier points at and after its first step, and
so does a checkpoint that was made again. Each step has one point per tag, the newest.
A file that is still being written may end within a record; its complete records are read.
"""

import pathlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

PREFIX = "events.out.tfevents."


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    wall_time: float  # Seconds since 1970.
    value: float
    start: int  # Index of the file; every start of the program writes a new one.
    commit: str = ""  # Digest of the checkpoint that was evaluated, if known.


Curves = dict[str, list[Point]]


def read_curves(directory: pathlib.Path) -> Curves:
    """Reads the points of every tag, in order of their steps."""
    curves: dict[str, dict[int, Point]] = {}
    for start, path in enumerate(sorted(directory.glob(f"{PREFIX}*"))):
        for event in _events(path):
            if event.session_log.status == event.session_log.START:
                for tag, points in curves.items():
                    curves[tag] = {n: point for n, point in points.items() if n < event.step}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves.setdefault(value.tag, {})[event.step] = Point(
                        event.step, event.wall_time, value.simple_value, start, value.node_name
                    )
    return {tag: sorted(points.values()) for tag, points in curves.items() if points}


def _events(path: pathlib.Path) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboardX.proto import event_pb2

    protos: Any = event_pb2  # Its classes are created at import, without types.
    for record in _records(path.read_bytes()):
        try:
            yield protos.Event.FromString(record)
        except DecodeError:
            return


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the data of each record: length, its checksum, data, checksum of the data."""
    start = 0
    while start + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + size + 4
        if end > len(data):
            return
        yield data[start + 12 : end - 4]
        start = end
