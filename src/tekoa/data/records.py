"""TFRecord and array_record files, read by grain."""

from collections.abc import Callable, Sequence
from typing import Any

from tekoa.data import files
from tekoa.data.reader import DataError, Example, Reader
from tekoa.data.sequences import SequenceReader
from tekoa.data.streams import Cursor, StreamReader
from tekoa.data.tf_example import parse_example


def read_array_records(paths: Sequence[str]) -> Reader:
    """Reads array_record files with random access.

    A record that is a `tf.train.Example` becomes its features; any other one becomes
    `{'record': bytes}`, for `source.map` to decode. The first record decides for all.
    """
    grain = files.require("grain", "records", f"Reading {paths[0]}")
    for path in paths:
        files.check_readable(path)
    try:
        records = grain.sources.ArrayRecordDataSource(list(paths))
        first = records[0] if len(records) else b""
    except Exception as error:  # Its reader raises plain RuntimeErrors and more.
        raise DataError(f"{files.names(paths)} cannot be read as array_record: {error}.") from None
    return SequenceReader(records, f"records of {files.names(paths)}", _decoder(first))


def read_tfrecords(paths: Sequence[str]) -> Reader:
    """Reads TFRecord files forwards; records become examples as for array_record."""
    stream = TfRecordStream(paths)
    return StreamReader(stream, _decoder(stream.first()))


class TfRecordStream:
    """Records of TFRecord files, one file after the other."""

    def __init__(self, paths: Sequence[str]):
        self._paths = list(paths)
        n_bytes = sum(files.check_readable(path) for path in paths)
        self.name = f"records of {files.names(paths)}: {n_bytes} bytes"

    def open(self, state: Any) -> Cursor:
        """Starts at a noted place `[file, place in the file]`."""
        return _TfRecordCursor(self._paths, state)

    def first(self) -> bytes:
        """Reads the first record."""
        return next(self.open(None))


class _TfRecordCursor:
    def __init__(self, paths: list[str], state: Any):
        grain = files.require("grain", "records", f"Reading {paths[0]}")
        self._open = grain.experimental.TFRecordIterDataset
        self._paths = paths
        self._at, place = state or (0, None)
        self._records = iter(self._open(paths[self._at]))
        if place is not None:
            self._records.set_state(place)

    def __next__(self) -> bytes:
        while True:
            try:
                return next(self._records)
            except StopIteration:
                if self._at + 1 == len(self._paths):
                    raise
                self._at += 1
                self._records = iter(self._open(self._paths[self._at]))
            except (ValueError, MemoryError, OverflowError) as error:
                raise DataError(
                    f"{self._paths[self._at]} is cut off or is not an uncompressed TFRecord file, "
                    f"at {self.state()[1]}: {str(error)[:80]}."
                ) from None

    def state(self) -> Any:
        return [self._at, self._records.get_state()]


def _decoder(first: bytes) -> Callable[[bytes], Example]:
    try:
        is_example = bool(parse_example(first))
    except ValueError:
        is_example = False
    return parse_example if is_example else raw_record


def raw_record(record: bytes) -> Example:
    """Makes an example of a record that is left as it is.

    >>> raw_record(b'ab')
    {'record': b'ab'}
    """
    return {"record": record}
