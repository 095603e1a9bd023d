"""Reads the scalars of TensorBoard files, without TensorBoard.

As TensorBoard does, a mark of a new start makes the points of earlier files at and after
its step forgotten. A file that is still written may end in the middle of a record: what is
whole is read.
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
    start: int  # Which start of the program wrote it, counted from 0.


Curves = dict[str, list[Point]]


def read_curves(directory: pathlib.Path) -> Curves:
    """Gives the points of every tag, by rising step."""
    curves: Curves = {}
    for start, path in enumerate(sorted(directory.glob(f"{PREFIX}*"))):
        for event in _events(path):
            if event.HasField("session_log"):
                _forget(curves, event)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    point = Point(event.step, event.wall_time, value.simple_value, start)
                    curves.setdefault(value.tag, []).append(point)
    return {tag: sorted(points) for tag, points in curves.items() if points}


def _forget(curves: Curves, event: Any) -> None:
    if event.session_log.status == event.session_log.START:
        for tag, points in curves.items():
            curves[tag] = [point for point in points if point.step < event.step]


def _events(path: pathlib.Path) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboardX.proto import event_pb2

    protos: Any = event_pb2  # Its classes are made when it is imported: they have no types.
    for record in _records(path.read_bytes()):
        try:
            yield protos.Event.FromString(record)
        except DecodeError:
            return


def _records(data: bytes) -> Iterator[bytes]:
    """Records are framed by their length, its checksum, and a checksum at the end."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + size + 4
        if end > len(data):
            return
        yield data[at + 12 : end - 4]
        at = end
