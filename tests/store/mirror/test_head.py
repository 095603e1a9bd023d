import pytest

from tekoa.store import errors
from tekoa.store.mirror import head as head_lib
from tekoa.store.mirror.head import Head, Part, encode, parse

HEAD = Head(
    id="abc", fence=3, files={"a/b": (Part("files/1/a/b", 2, 7), Part("files/2/a/b", 1, 8))}
)


def test_a_head_survives_its_encoding():
    assert parse(encode(HEAD), "s3://b/run") == HEAD
    assert HEAD.objects == {"files/1/a/b", "files/2/a/b"}


def test_every_flipped_bit_is_noticed():
    data = encode(HEAD)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(errors.DamagedError, match="s3://b/run"):
            parse(bytes(flipped), "s3://b/run")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../b", ""])
def test_files_outside_the_directory_are_refused(path):
    for head in (Head(files={path: ()}), Head(files={"a": (Part(path, 0, 0),)})):
        with pytest.raises(errors.UnsafeError, match="outside"):
            parse(encode(head), "s3://b/run")


def test_later_versions_are_recognised(monkeypatch):
    monkeypatch.setattr(head_lib, "VERSION", 2)
    data = encode(HEAD)
    monkeypatch.setattr(head_lib, "VERSION", 1)
    with pytest.raises(errors.NewerVersionError, match="version 2"):
        parse(data, "s3://b/run")
