"""Reads the scalars of TensorBoard files, without TensorBoard.

As in TensorBoard, a restart of the program drops earlier points at and after its first step, and
so does a checkpoint that was made again. Each step has one point per tag, the newest.
A file that is still being written may end within a record; its complete records are read.
"""

import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tekoa import _extras
from tekoa.core import files
from tekoa.data.readers import tfrecord
from tekoa.store import errors

PREFIX = "events.out.tfevents."
_MAX_EVENT_BYTES = 2**28


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    wall_time: float  # Seconds since 1970.
    value: float
    start: int  # Index of the file; every start of the program writes a new one.
    commit: str = ""  # As in `extensions/tensorboard.py:Point`.


Curves = dict[str, list[Point]]


def read_curves(
    directory: pathlib.Path, problems: list[str] | None = None, *, without: str = ""
) -> Curves:
    """Reads the points of every tag, in order of their steps.

    Args:
        directory: The directory of the files.
        problems: If set, a line is added for each damaged or forbidden file, and its points up to
            the damage are used.
        without: Leave out the tags that contain this text, which saves their time.

    Raises:
        errors.DamagedError: If a file is damaged and `problems` is None.
    """
    curves: dict[str, dict[int, Point]] = {}
    for start, path in enumerate(sorted(directory.glob(f"{PREFIX}*"))):
        try:
            for event in _events(path, without.encode()):
                _add_points(curves, event, start)
        except (errors.DamagedError, PermissionError) as error:
            if problems is None:
                raise
            problems.append(str(error))
    return {tag: sorted(points.values()) for tag, points in curves.items() if points}


def _add_points(curves: dict[str, dict[int, Point]], event: Any, start: int) -> None:
    if event.HasField("session_log") and event.session_log.status == event.session_log.START:
        for tag, points in curves.items():
            curves[tag] = {n: point for n, point in points.items() if n < event.step}
    for value in event.summary.value:
        if value.HasField("simple_value"):
            curves.setdefault(value.tag, {})[event.step] = Point(
                event.step, event.wall_time, value.simple_value, start, value.node_name
            )


def _events(path: pathlib.Path, without: bytes) -> Iterator[Any]:
    """Yields the events up to the first that is incomplete.

    Raises:
        errors.DamagedError: If the file is damaged in another way.
    """
    from google.protobuf.message import DecodeError

    # Its classes are created at import, without types.
    protos: Any = _extras.import_inside("tensorboardX.proto.event_pb2")
    at = 0
    read = functools.partial(tfrecord.read_record, max_bytes=_MAX_EVENT_BYTES)
    try:
        # Not read at once: a file may claim any size.
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            while (record := read(file, size)) is not None:
                if not without or without not in record:
                    yield protos.Event.FromString(record)
                at = file.tell()
    except tfrecord.TruncatedRecordError:
        return
    except PermissionError:
        raise  # This is no damage.
    except (tfrecord.RecordError, DecodeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.DamagedError(f"{path}: is damaged at byte {at}: {reason}.") from None
