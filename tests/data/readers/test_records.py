import itertools
import json
import struct

import numpy as np
import pytest
from tensorboardX.record_writer import masked_crc32c

from tekoa import data
from tekoa.data.readers import records

pytest.importorskip("grain", reason="the 'records' extra is not installed")


def example(at):
    """Returns a serialized tf.train.Example {'x': at}; see the wire format below."""
    feature = bytes([0x1A, 3, 0x0A, 1, at])
    entry = bytes([0x0A, 1]) + b"x" + bytes([0x12, len(feature)]) + feature
    inner = bytes([0x0A, len(entry)]) + entry
    return bytes([0x0A, len(inner)]) + inner


def write_tfrecord(path, records):
    # Length, its checksum, the record, its checksum; tensorboardX has its own implementation.
    with path.open("wb") as file:
        for record in records:
            for part in (struct.pack("<Q", len(record)), record):
                file.write(part + struct.pack("<I", masked_crc32c(part)))


def write_array_record(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


WRITERS = {"tfrecord": write_tfrecord, "array_record": write_array_record}


@pytest.mark.parametrize("kind", WRITERS)
def test_examples_of_several_files_are_parsed(tmp_path, kind):
    for part in range(3):
        records = [example(at) for at in range(10 * part, 10 * part + 10)]
        WRITERS[kind](tmp_path / f"data.{kind}-0000{part}-of-00003", records)
    source = data.load(f"{tmp_path}/data.{kind}*")
    assert [int(e["x"]) for e in source] == list(range(30))
    assert len(source) == 30
    assert source.info.shapes == {"x": ()}


@pytest.mark.parametrize("kind", WRITERS)
def test_records_of_another_kind_stay_bytes(tmp_path, kind):
    WRITERS[kind](tmp_path / f"a.{kind}", [b"\xffone", b"\xfftwo"])
    source = data.load(f"{tmp_path}/a.{kind}")
    assert [example["record"] for example in source] == [b"\xffone", b"\xfftwo"]
    lengths = source.map(lambda example: {"n": len(example["record"])})
    assert next(lengths.batches(2))["n"].tolist() == [4, 4]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("shuffle", [None, 7])
def test_records_resume_in_the_same_order(tmp_path, kind, shuffle):
    for part in range(2):
        records = [example(at) for at in range(20 * part, 20 * part + 20)]
        WRITERS[kind](tmp_path / f"{part}.{kind}", records)

    def batches():
        return data.load(f"{tmp_path}/*.{kind}").batches(4, shuffle=shuffle)

    running = batches()
    rows, states = [], []
    for _ in range(25):
        states.append(json.loads(json.dumps(running.state())))
        rows.append(next(running)["x"].tolist())
    assert sorted(itertools.chain(*rows[:10])) == list(range(40))
    for at in (0, 3, 10, 17, 24):
        again = batches()
        again.restore(states[at])
        assert next(again)["x"].tolist() == rows[at]


def test_truncated_record_file_is_named(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecord", [example(1), example(2)])
    content = (tmp_path / "a.tfrecord").read_bytes()
    (tmp_path / "a.tfrecord").write_bytes(content[:-5])
    source = data.load(f"{tmp_path}/a.tfrecord")
    with pytest.raises(data.DataError, match=r"a\.tfrecord is truncated"):
        list(source)


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_changed_byte_of_a_record_file_is_noticed(tmp_path, at):
    write_tfrecord(tmp_path / "a.tfrecord", [example(1), example(2)])
    content = bytearray((tmp_path / "a.tfrecord").read_bytes())
    content[at] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(content)
    with pytest.raises(data.DataError, match=r"a\.tfrecord .* at byte \d+: .*checksum"):
        list(data.load(f"{tmp_path}/a.tfrecord"))


def test_position_saved_by_earlier_versions_is_used(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecord", [example(1), example(2)])
    stream = records.TfRecordStream([str(tmp_path / "a.tfrecord")])
    n_bytes = 16 + len(example(1))
    assert next(stream.open([0, {"reader_offset": n_bytes}])) == example(2)


@pytest.mark.parametrize("kind", WRITERS)
def test_file_that_contains_no_records_raises(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_text("just some text, long enough to have a header " * 10)
    with pytest.raises(data.DataError, match=rf"a\.{kind} "):
        data.load(str(path))


@pytest.mark.parametrize("kind", WRITERS)
def test_empty_record_file_raises(tmp_path, kind):
    (tmp_path / f"a.{kind}").touch()
    with pytest.raises(data.DataError, match="is empty"):
        data.load(f"{tmp_path}/a.{kind}")


# The wire format, written by hand (protobuf.dev/programming-guides/encoding): a tag byte is
# field number * 8 + wire type, always 2 in this file (a length, then that many bytes).


def field(number, content):
    assert len(content) < 128
    return bytes([number * 8 + 2, len(content)]) + content


def serialized(**features):
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


def test_features_keep_their_types():
    read = records.parse_example(
        serialized(ints=INTS, one=ONE_INT, negative=NEGATIVE, floats=FLOATS, bytes=BYTES)
    )
    assert read["ints"].tolist() == [5, 6, 7]
    assert read["ints"].dtype == np.int64
    assert read["one"] == 9
    assert read["negative"] == -1
    assert read["floats"].tolist() == [0.5, -2]
    assert read["floats"].dtype == np.float32
    assert read["bytes"] == b"abc"


def test_several_byte_strings_stay_separate():
    assert records.parse_example(serialized(b=TWO_BYTES))["b"].tolist() == [b"abc", b"\xff"]


def test_empty_feature_is_an_empty_array():
    assert records.parse_example(serialized(x=b""))["x"].shape == (0,)


@pytest.mark.parametrize("record", [b"\xff\xff", b"\x0a\x7f short"])
def test_bytes_that_are_no_tf_example_raise(record):
    with pytest.raises(ValueError, match=r"is not a tf\.train\.Example"):
        records.parse_example(record)
