"""Records as TensorFlow and tensorboardX write them."""

import struct

import pytest
from tensorboardX.record_writer import masked_crc32c

from support import hostile
from tekoa.data.readers import tfrecord

DATA = [b"", b"a", b"abc" * 1000]


def write(path, *records):
    with path.open("wb") as file:
        for record in records:
            for part in (struct.pack("<Q", len(record)), record):
                file.write(part + struct.pack("<I", masked_crc32c(part)))
    return path


def read(path):
    with path.open("rb") as file:
        records = []
        while (record := tfrecord.read_record(file)) is not None:
            records.append(record)
        return records


def test_records_of_another_implementation_are_read(tmp_path):
    assert read(write(tmp_path / "x", *DATA)) == DATA


def test_encoded_records_equal_those_of_another_implementation(tmp_path):
    expected = write(tmp_path / "x", *DATA).read_bytes()
    assert b"".join(map(tfrecord.encode_record, DATA)) == expected


@pytest.mark.parametrize("n_bytes", range(1, 17))
def test_end_within_a_record_is_noticed(tmp_path, n_bytes):
    path = write(tmp_path / "x", b"a")
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(tfrecord.TruncatedRecordError):
        read(path)


@pytest.mark.parametrize("bit", range(0, 17 * 8, 5))
def test_changed_bit_is_noticed(tmp_path, bit):
    path = write(tmp_path / "x", b"a")
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(tfrecord.RecordError, match="checksum"):
        read(path)


def test_length_beyond_the_file_allocates_nothing(tmp_path):
    header = struct.pack("<Q", 2**62)
    (tmp_path / "x").write_bytes(header + struct.pack("<I", masked_crc32c(header)) + b"abc")
    with pytest.raises(tfrecord.TruncatedRecordError, match="4611686018427387904 bytes"):
        read(tmp_path / "x")


def test_file_of_zeros_ends_at_the_first_record(tmp_path):
    hostile.sparse(tmp_path / "x")
    with pytest.raises(tfrecord.RecordError):
        read(tmp_path / "x")
