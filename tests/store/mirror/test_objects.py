import sys

import pytest

from tekoa._extras import MissingPackageError
from tekoa.store import errors
from tekoa.store.mirror.objects import Objects


def test_objects_are_uploaded_listed_downloaded_and_deleted(url, tmp_path):
    objects = Objects(url)
    (tmp_path / "big").write_bytes(b"x" * 5000)
    objects.upload({"files/1/big": tmp_path / "big", "files/2/s": b"s"}, lambda: None)
    assert objects.names_in("files") == ["files/1/big", "files/2/s"]
    assert objects.folders() == ["files"]
    assert objects.download_to("files/1/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"x" * 5000
    assert objects.download("files/2/s") == b"s"
    assert objects.download("files/none") is None
    assert not objects.download_to("files/none", tmp_path / "copy2")
    objects.delete(["files/2/s", "files/none"])
    assert objects.names_in("files") == ["files/1/big"]


def test_after_an_error_no_more_objects_are_uploaded(url, monkeypatch):
    objects, n_tries = Objects(url), []

    def fail(*_, **__):
        n_tries.append(1)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(type(objects._store), "pipe_file", fail)
    with pytest.raises(errors.UnreachableError):
        objects.upload({f"files/{n}": b"s" for n in range(500)}, lambda: None)
    assert len(n_tries) <= 8  # The uploads that had begun.


def test_errors_of_the_store_name_the_object(url, monkeypatch):
    objects = Objects(url)

    def fail(*_, **__):
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(type(objects._store), "cat_file", fail)
    with pytest.raises(errors.UnreachableError, match=r"bucket/run/a: .*nobody is there"):
        objects.read("a")


@pytest.mark.parametrize(("url", "package"), [("s3://b/run", "s3fs"), ("gs://b/run", "gcsfs")])
def test_a_missing_package_is_named(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}.*pip install 'tekoa\[cloud\]'"):
        Objects(url)
