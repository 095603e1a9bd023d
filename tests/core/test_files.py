"""Paths and files from outside: URLs are refused, only regular files of bounded size are read."""

import os
import pathlib
import socket
import tracemalloc

import pytest

from tekoa.core import files

URLS = ["gs://b/run", "s3://b/run", "hdfs://x", "file:///tmp/x", "https://h/x", "memory:/x"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_urls_are_refused(url, kind):
    with pytest.raises(files.PathError, match="only local paths"):
        files.local_path(kind(url))


@pytest.mark.parametrize("path", ["run", "./gs:/b", "a:b", "/data/gs:/x", "run://"[:3], "c:/x"])
def test_local_paths_are_kept(path):
    assert files.local_path(path) == pathlib.Path(path)


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    assert files.local_path("~/run") == pathlib.Path("/users/me/run")
    assert files.local_path("~no such user/run") == pathlib.Path("~no such user/run")


def test_null_character_is_refused():
    with pytest.raises(files.PathError, match="null character"):
        files.local_path("run\0")


def test_half_of_a_character_is_refused_and_bytes_of_a_file_name_are_not():
    with pytest.raises(files.PathError, match="half of a character"):
        files.local_path("run\ud800")
    assert files.local_path("run\udc80") == pathlib.Path("run\udc80")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


IRREGULAR = {
    "named pipe": os.mkfifo,
    "directory": os.mkdir,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "socket": make_socket,
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_read(tmp_path, kind):
    IRREGULAR[kind](tmp_path / "x")
    with pytest.raises(OSError, match=rf"is a {kind}, not a regular file.*x'"):
        files.read_bytes(tmp_path / "x", max_bytes=100)


def test_devices_are_not_read():
    with pytest.raises(OSError, match="is a device"):
        files.read_bytes("/dev/zero", max_bytes=100)


def test_link_to_a_regular_file_is_followed_only_if_allowed(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    with files.open_regular(tmp_path / "link", follow_links=True) as file:
        assert file.read() == b"abc"
    with pytest.raises(OSError, match="is a link"):
        files.open_regular(tmp_path / "link")


def test_sparse_file_costs_no_memory(tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(10 * 2**30)
    tracemalloc.start()
    with pytest.raises(OSError, match="has 10737418240 bytes"):
        files.read_bytes(tmp_path / "huge", max_bytes=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "Expecting"), ("[1]", "JSON object"), ("{", "Expecting"), ("[" * 10**5, "deeply")],
)
def test_json_that_is_no_object_is_refused(tmp_path, text, problem):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=problem):
        files.read_json(tmp_path / "x", max_bytes=2**20)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe\xfa{}")
    with pytest.raises(ValueError, match="decode"):
        files.read_json(tmp_path / "x", max_bytes=2**20)
