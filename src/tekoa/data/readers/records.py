"""TFRecord files; array_record files, read by grain; `tf.train.Example` without TensorFlow."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tekoa.core import messages
from tekoa.data.readers import files, tfrecord
from tekoa.data.readers.base import DataError, Example, Reader
from tekoa.data.readers.memory import SequenceReader
from tekoa.data.readers.streams import Cursor, StreamReader

# The name of a position in a file, as in grain's TFRecord reader.
_OFFSET = "reader_offset"


def read_array_records(paths: Sequence[str]) -> Reader:
    """Reads array_record files with random access.

    If the first record is a `tf.train.Example`, all records are parsed into their features.
    Otherwise each becomes `{'record': bytes}`, for `source.map` to decode.
    """
    grain = files.require("grain", "records", f"Reading {paths[0]}")
    for path in paths:
        files.check_readable(path)
    try:
        source = grain.sources.ArrayRecordDataSource(list(paths))
        records = _ArrayRecords(source, files.names(paths))
        first = records[0] if len(records) else b""
    except Exception as error:  # The library raises RuntimeError and others.
        raise DataError(f"Cannot read {files.names(paths)} as array_record: {error}.") from None
    return SequenceReader(records, f"records of {files.names(paths)}", _decoder(first))


class _ArrayRecords:
    """Records of array_record files; damage shows only when the damaged part is read."""

    def __init__(self, source: Any, name: str):
        self._source, self._name = source, name

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> bytes:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> Sequence[bytes]:
        try:
            return self._source.__getitems__(rows)
        except Exception as error:  # As above.
            shown = messages.some_of(rows)
            raise DataError(f"{self._name}: cannot read the records {shown}: {error}.") from None


def read_tfrecords(paths: Sequence[str]) -> Reader:
    """Reads TFRecord files forwards; records are decoded as in array_record files."""
    stream = TfRecordStream(paths)
    first = next(stream.open(None), None)
    if first is None:
        raise DataError(f"{stream.name}: there are no records.")
    return StreamReader(stream, _decoder(first))


class TfRecordStream:
    """The records of TFRecord files, one file after the other."""

    is_reusable = True

    def __init__(self, paths: Sequence[str]):
        self._paths = list(paths)
        n_bytes = sum(files.check_readable(path) for path in paths)
        self.name = f"records of {files.names(paths)}: {n_bytes} bytes"

    def open(self, state: Any) -> Cursor:
        """Starts at a saved position `[file number, position in the file]`."""
        return _TfRecordCursor(self._paths, state)


class _TfRecordCursor:
    def __init__(self, paths: list[str], state: Any):
        self._paths = paths
        self._at, position = state or (0, {_OFFSET: 0})
        self._file = files.open_file(paths[self._at])
        self._file.seek(position[_OFFSET])

    def __next__(self) -> bytes:
        while True:
            start = self._file.tell()
            try:
                record = tfrecord.read_record(self._file)
            except tfrecord.RecordError as error:
                raise DataError(
                    f"{self._paths[self._at]} is truncated or is not an uncompressed TFRecord "
                    f"file, at byte {start}: {error}. Download or copy it again."
                ) from None
            if record is not None:
                return record
            if self._at + 1 == len(self._paths):
                raise StopIteration
            self._file.close()
            self._at += 1
            self._file = files.open_file(self._paths[self._at])

    def __del__(self):
        if hasattr(self, "_file"):
            self._file.close()

    def state(self) -> Any:
        return [self._at, {_OFFSET: self._file.tell()}]


def _decoder(first: bytes) -> Callable[[bytes], Example]:
    try:
        is_example = bool(parse_example(first))
    except ValueError:
        is_example = False
    return parse_example if is_example else raw_record


def raw_record(record: bytes) -> Example:
    """Wraps a record as an example without decoding it.

    >>> raw_record(b'ab')
    {'record': b'ab'}
    """
    return {"record": record}


def parse_example(record: bytes) -> Example:
    """Parses the features of a serialized `tf.train.Example` with protobuf.

    A feature with one value becomes a scalar, one with several an array. Numbers are int64
    or float32, as in the format.

    Raises:
        DataError: If the bytes are not a `tf.train.Example`.
    """
    decode_error = _protobuf("message").DecodeError
    try:
        message = _example_class().FromString(record)
    except decode_error:
        raise DataError(
            f"A record of {len(record)} bytes is not a tf.train.Example: it starts with "
            f"{record[:8]!r}. All records of a source must be of one kind."
        ) from None
    return {name: _feature(value) for name, value in sorted(message.features.feature.items())}


def _feature(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else []
    if kind == "bytes_list":
        array = np.empty(len(values), object)
        array[:] = list(values)
    else:
        array = np.array(values, np.float32 if kind == "float_list" else np.int64)
    return array[0] if len(array) == 1 else array


def _protobuf(module: str) -> Any:
    return files.require(f"google.protobuf.{module}", "records", "Reading tf.train.Example")


@functools.cache
def _example_class() -> Any:
    """Builds the message class of `tf.train.Example` from its published field numbers."""
    descriptor_pb2 = _protobuf("descriptor_pb2")
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tekoa/data/example.proto", package="tekoa", syntax="proto3"
    )
    kinds = {"Bytes": kind.TYPE_BYTES, "Float": kind.TYPE_FLOAT, "Int64": kind.TYPE_INT64}
    for name, value in kinds.items():
        _add_field(file.message_type.add(name=f"{name}List"), "value", value, is_many=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for name in kinds:
        _add_field(feature, f"{name.lower()}_list", f".tekoa.{name}List").oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    _add_field(entry, "key", kind.TYPE_STRING)
    _add_field(entry, "value", ".tekoa.Feature")
    _add_field(features, "feature", ".tekoa.Features.FeatureEntry", is_many=True)
    _add_field(file.message_type.add(name="Example"), "features", ".tekoa.Features")
    pool = _protobuf("descriptor_pool").DescriptorPool()
    pool.Add(file)
    example = pool.FindMessageTypeByName("tekoa.Example")
    return _protobuf("message_factory").GetMessageClass(example)


def _add_field(message: Any, name: str, kind: int | str, *, is_many: bool = False) -> Any:
    """Adds a field of a scalar type (a number) or of a message type (its name)."""
    field = message.field.add(name=name, number=len(message.field) + 1)
    field.label = field.LABEL_REPEATED if is_many else field.LABEL_OPTIONAL
    if isinstance(kind, str):
        field.type, field.type_name = field.TYPE_MESSAGE, kind
    else:
        field.type = kind
    return field
