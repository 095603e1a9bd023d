"""Durable files: checksums, atomic replacement, walking."""

import os
import pathlib
import stat
import zlib

import pytest

from tekoa.store.commit import durable


@pytest.mark.parametrize(("data", "crc"), [(b"", 0), (b"123456789", 0xCBF43926)])
def test_checksum_is_crc32(tmp_path, data, crc):
    # 0xCBF43926 is the published check value of CRC-32.
    (tmp_path / "file").write_bytes(data)
    size, computed = durable.checksum(tmp_path / "file", sync=True)
    assert size == len(data)
    assert computed == crc


def test_checksum_of_a_large_file_covers_all_bytes(tmp_path):
    data = bytes(range(256)) * 12345
    (tmp_path / "file").write_bytes(data)
    assert durable.checksum(tmp_path / "file") == (len(data), zlib.crc32(data))


def test_checksums_in_threads_keep_the_order_of_the_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_MANY_BYTES", 0)
    names = [str(i) for i in range(50)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    expected = {name: (len(name), zlib.crc32(name.encode())) for name in names}
    assert list(durable.checksums(tmp_path, names).items()) == list(expected.items())


def test_checksums_do_not_need_new_threads(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(durable, "_MANY_BYTES", 0)
    monkeypatch.setattr(durable.threading.Thread, "start", refuse)
    (tmp_path / "file").write_bytes(b"123456789")
    assert durable.checksums(tmp_path, ["file"]) == {"file": (9, 0xCBF43926)}


def test_failure_in_one_of_several_threads_is_raised(tmp_path, monkeypatch):
    def fail(path, *, sync=False):
        raise OSError(f"{path.name} is unreadable")

    monkeypatch.setattr(durable, "_MANY_BYTES", 0)
    monkeypatch.setattr(durable, "checksum", fail)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file is unreadable"):
        durable.checksums(tmp_path, ["file"])


def test_replace_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    durable.replace(tmp_path / "file", b"old")

    def fail(path, data, *, sync):
        pathlib.Path(path).write_bytes(data[:1])
        raise OSError("disk")

    monkeypatch.setattr(durable, "write_new", fail)
    with pytest.raises(OSError, match="disk"):
        durable.replace(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("sync", "expected"), [(True, ["file", "rename", "directory"]), (False, ["rename"])]
)
def test_replace_syncs_the_file_before_and_the_directory_after(
    tmp_path, monkeypatch, sync, expected
):
    calls, rename = [], os.replace

    def fsync(fd):
        calls.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")

    def replace(*paths):
        calls.append("rename")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    durable.replace(tmp_path / "file", b"new", sync=sync)
    assert calls == expected


def test_write_new_fails_for_an_existing_file(tmp_path):
    durable.write_new(tmp_path / "file", b"1")
    with pytest.raises(FileExistsError):
        durable.write_new(tmp_path / "file", b"2")


def test_walk_yields_contents_before_directories(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    (tmp_path / "link").symlink_to("/")
    assert list(durable.walk(tmp_path)) == [
        ("a/b/c", False),
        ("a/b", True),
        ("a", True),
        ("link", False),
    ]
