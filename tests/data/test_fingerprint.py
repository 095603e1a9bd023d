import pytest

from tekoa.data import fingerprint
from tekoa.data.fingerprint import fingerprint as of


def test_the_content_of_small_files_is_covered(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("x,y\n3,4\n")
    before = of(f"{tmp_path}/*.csv")
    assert before is not None
    assert before.startswith("2 files of 16 bytes, digest ")
    (tmp_path / "b.csv").write_text("x,y\n3,5\n")
    assert of(f"{tmp_path}/*.csv") != before
    (tmp_path / "b.csv").write_text("x,y\n3,4\n")
    assert of(f"{tmp_path}/*.csv") == before


def test_pieces_of_large_files_are_covered(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 4)
    monkeypatch.setattr(fingerprint, "_N_PIECES", 10)
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in paths:
        path.write_bytes(bytes(150))
    before = of(str(tmp_path / "*.npz"))
    n_noticed = 0
    for path in paths:
        for i in range(150):
            path.write_bytes(bytes(i) + b"x" + bytes(149 - i))
            n_noticed += of(str(tmp_path / "*.npz")) != before
        path.write_bytes(bytes(150))
    assert n_noticed == 10 * 4
    paths[1].write_bytes(bytes(151))
    assert of(str(tmp_path / "*.npz")) != before


def test_files_in_the_directory_of_a_scheme_are_covered(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"abc")
    assert str(of(f"idx://{tmp_path}/split=train")).startswith("1 file of 3 bytes")


@pytest.mark.parametrize(
    "pattern", [None, "digits://split=train", "rows", "s3://bucket/*.csv", "mix://1*a.csv; 2*b.csv"]
)
def test_data_that_is_not_in_local_files_has_none(pattern):
    assert of(pattern) is None
