import gzip

import pytest

from tekoa.data.readers import files
from tekoa.data.readers.base import DataError


def test_gzip_is_decompressed(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"abc"))
    (tmp_path / "a").write_bytes(b"abc")
    assert files.read_bytes(tmp_path / "a.gz") == files.read_bytes(tmp_path / "a") == b"abc"


def test_truncated_gzip_raises(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(range(256)) * 100)[:-20])
    with pytest.raises(DataError, match=r"a\.gz is truncated"):
        files.read_bytes(path)


def test_corrupt_gzip_raises(tmp_path):
    path = tmp_path / "a.gz"
    content = bytearray(gzip.compress(bytes(range(256)) * 100))
    content[40] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.gz is not valid gzip data"):
        files.read_bytes(path)
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match=r"a\.gz is not valid gzip data"):
        files.read_bytes(path)


@pytest.mark.parametrize("read", [files.read_bytes, files.check_readable])
def test_missing_and_empty_files_raise(tmp_path, read):
    with pytest.raises(DataError, match=r"Cannot read .*nothing: No such file"):
        read(tmp_path / "nothing")
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty is empty"):
        read(tmp_path / "empty")


def test_long_lists_of_files_are_shortened():
    assert files.names([f"d/{at}.txt" for at in range(9)]) == (
        "0.txt, 1.txt, 2.txt, 3.txt and 5 more"
    )


def test_missing_library_is_named_with_its_extra():
    with pytest.raises(DataError, match=r"needs 'nosuchlib'.*pip install 'tekoa\[tables\]'"):
        files.require("nosuchlib.part", "tables", "Reading x.csv")
