"""The records of TFRecord and TensorBoard files: length, checksum, data, checksum of the data.

The checksums are masked CRC-32C. Both are verified, and a length is believed only if its own
checksum matches and the file is long enough. Imports no JAX.
"""

import os
import struct
from typing import IO

import crc32c

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


class RecordError(ValueError):
    """A record does not match its checksum."""


class TruncatedRecordError(RecordError):
    """The file ends within a record."""


def read_record(
    file: IO[bytes], size: int | None = None, *, max_bytes: int = 2**31
) -> bytes | None:
    """Reads the record at the position of a file; None at its end.

    Args:
        file: The file.
        size: Its size, if it does not grow; asked for at every record by default.
        max_bytes: The largest record, by default the largest message of Protocol Buffers.

    Raises:
        RecordError: If the record is truncated, too large, or does not match its checksums. The
            position of the file is then undefined.
    """
    n_left = (os.fstat(file.fileno()).st_size if size is None else size) - file.tell()
    header = file.read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise TruncatedRecordError(f"the file ends after {len(header)} bytes of a header")
    length, checksum = _HEADER.unpack(header)
    if masked_crc(header[:8]) != checksum:
        raise RecordError("the length of the record does not match its checksum")
    if length + _HEADER.size + _CHECKSUM.size > n_left:
        raise TruncatedRecordError(f"the record has {length} bytes, but the file ends before")
    if length > max_bytes:
        raise RecordError(f"the record has {length} bytes, at most {max_bytes} are expected")
    data = file.read(length)
    if file.read(_CHECKSUM.size) != _CHECKSUM.pack(masked_crc(data)):
        raise RecordError(f"the {length} bytes of the record do not match their checksum")
    return data


def encode_record(data: bytes) -> bytes:
    """Returns a record with its length and checksums.

    >>> encode_record(b'').hex(' ', 4)
    '00000000 00000000 29039807 d8ea82a2'
    """
    header = struct.pack("<Q", len(data))
    checksums = (_CHECKSUM.pack(masked_crc(part)) for part in (header, data))
    return header + next(checksums) + data + next(checksums)


def masked_crc(data: bytes) -> int:
    """Returns the checksum of the format: a CRC-32C, rotated and shifted by a constant."""
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
