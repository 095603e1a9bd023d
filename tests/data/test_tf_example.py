import numpy as np
import pytest

from tekoa.data import tf_example

# The wire format by hand (protobuf.dev/programming-guides/encoding): a tag byte is
# field number * 8 + wire type, here always type 2 (a length, then so many bytes).


def field(number, content):
    assert len(content) < 128
    return bytes([number * 8 + 2, len(content)]) + content


def example(**features):
    entries = b"".join(
        field(1, field(1, name.encode()) + field(2, value)) for name, value in features.items()
    )
    return field(1, entries)


INTS = field(3, field(1, bytes([5, 6, 7])))
ONE_INT = field(3, field(1, bytes([9])))
NEGATIVE = field(3, field(1, b"\xff" * 9 + b"\x01"))
FLOATS = field(2, field(1, np.array([0.5, -2], "<f4").tobytes()))
BYTES = field(1, field(1, b"abc"))
TWO_BYTES = field(1, field(1, b"abc") + field(1, b"\xff"))


def test_features_are_read_by_type():
    read = tf_example.parse_example(
        example(ints=INTS, one=ONE_INT, negative=NEGATIVE, floats=FLOATS, bytes=BYTES)
    )
    assert read["ints"].tolist() == [5, 6, 7]
    assert read["ints"].dtype == np.int64
    assert read["one"] == 9
    assert read["negative"] == -1
    assert read["floats"].tolist() == [0.5, -2]
    assert read["floats"].dtype == np.float32
    assert read["bytes"] == b"abc"


def test_several_byte_strings_stay_apart():
    assert tf_example.parse_example(example(b=TWO_BYTES))["b"].tolist() == [b"abc", b"\xff"]


def test_an_empty_feature_is_an_empty_array():
    assert tf_example.parse_example(example(x=b""))["x"].shape == (0,)


@pytest.mark.parametrize("record", [b"\xff\xff", b"\x0a\x7f short"])
def test_other_bytes_are_refused(record):
    with pytest.raises(ValueError, match=r"is no tf\.train\.Example"):
        tf_example.parse_example(record)
