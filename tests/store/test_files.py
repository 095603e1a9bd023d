"""Files: checksums, atomic replacement, walking."""

import os
import pathlib
import zlib

import pytest

from tekoa.store import files


@pytest.mark.parametrize(("data", "crc"), [(b"", 0), (b"123456789", 0xCBF43926)])
def test_checksum_is_crc32(tmp_path, data, crc):
    # 0xCBF43926 is the published check value of CRC-32.
    (tmp_path / "file").write_bytes(data)
    size, seen = files.checksum(tmp_path / "file", sync=True)
    assert size == len(data)
    assert seen == crc


def test_checksum_of_a_large_file_is_that_of_its_bytes(tmp_path):
    data = bytes(range(256)) * 12345
    (tmp_path / "file").write_bytes(data)
    assert files.checksum(tmp_path / "file") == (len(data), zlib.crc32(data))


def test_replace_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    files.replace(tmp_path / "file", b"old")

    def fail(path, data):
        pathlib.Path(path).write_bytes(data[:1])
        raise OSError("disk")

    monkeypatch.setattr(files, "write_new", fail)
    with pytest.raises(OSError, match="disk"):
        files.replace(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_write_new_refuses_an_existing_file(tmp_path):
    files.write_new(tmp_path / "file", b"1")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "file", b"2")


def test_walk_gives_contents_before_directories(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    (tmp_path / "link").symlink_to("/")
    assert list(files.walk(tmp_path)) == [
        ("a/b/c", False),
        ("a/b", True),
        ("a", True),
        ("link", False),
    ]
