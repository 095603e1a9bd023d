"""Parses serialized `tf.train.Example` messages with protobuf, without TensorFlow."""

import functools
from typing import Any

import numpy as np

from tekoa.data import files
from tekoa.data.reader import DataError, Example


def parse_example(record: bytes) -> Example:
    """Reads the features of a serialized `tf.train.Example`.

    A feature of one value becomes a scalar, one of several an array. Numbers have 64-bit
    integer or 32-bit float type, as in the format.

    Raises:
        ValueError: If the bytes are no `tf.train.Example`.
    """
    decode_error = _protobuf("message").DecodeError
    try:
        message = _example_class().FromString(record)
    except decode_error:
        raise DataError(f"A record of {len(record)} bytes is no tf.train.Example.") from None
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
    for name, value in (
        ("Bytes", kind.TYPE_BYTES),
        ("Float", kind.TYPE_FLOAT),
        ("Int64", kind.TYPE_INT64),
    ):
        _add_field(file.message_type.add(name=f"{name}List"), "value", value, is_many=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for name in ("Bytes", "Float", "Int64"):
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
    """Adds the next field: of a scalar type, or of the message type so named."""
    field = message.field.add(name=name, number=len(message.field) + 1)
    field.label = field.LABEL_REPEATED if is_many else field.LABEL_OPTIONAL
    if isinstance(kind, str):
        field.type, field.type_name = field.TYPE_MESSAGE, kind
    else:
        field.type = kind
    return field
