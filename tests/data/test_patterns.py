import subprocess
import sys

import numpy as np
import pytest

from tekoa import data


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("three\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/c.txt").write_text("four\n")
    return tmp_path


def texts(pattern):
    return [example["text"] for example in data.load(pattern)]


def test_globs_are_sorted(folder):
    assert texts(f"{folder}/*.txt") == ["one", "two", "three"]
    assert texts(f"{folder}/**/*.txt") == ["one", "two", "three", "four"]


def test_text_files_form_one_reader(folder):
    # The name is part of the fingerprint of saved positions, so it must not change.
    assert repr(data.load(f"{folder}/*.txt")) == "<Source lines of a.txt, b.txt: 14 bytes>"


def test_commas_and_lists_keep_their_order(folder):
    expected = ["three", "one", "two"]
    assert texts(f"{folder}/b.txt, {folder}/a.txt") == expected
    assert texts([f"{folder}/b.txt", f"{folder}/a.txt"]) == expected


def test_existing_paths_are_not_parsed_as_patterns(folder):
    path = folder / "with, comma [1].txt"
    path.write_text("five\n")
    assert texts(path) == ["five"]
    assert texts([str(path)]) == ["five"]


def test_kinds_with_the_same_fields_are_concatenated(tmp_path):
    np.savez(tmp_path / "a.npz", image=np.zeros((3, 8, 8, 1), np.uint8), label=np.int32([0, 1, 2]))
    source = data.load(f"digits://split=test,npz://{tmp_path}/a.npz")
    assert len(source) == 363
    assert source[362]["label"] == 2
    assert source.info.n_classes == 10


def test_kinds_with_different_fields_raise(folder):
    with pytest.raises(data.DataError, match="Cannot concatenate data with different fields"):
        data.load(f"digits://split=test,{folder}/a.txt")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{}/nothing*", r"'.*/nothing\*' matches no file"),
        ("{}/a.txt,{}/nothing.txt", r"'.*/nothing.txt' matches no file"),
        ("{}", "It is a directory; add /\\*"),
        ("npz://{}/x.npz", r"'npz://.*x.npz' matches no file"),
        (
            "http://x",
            "unknown scheme 'http'.*'digits', 'dummy', .*'idx', .*'mix', 'npz', 's3', 'tfds'",
        ),
        ("seqio://x", "unknown scheme 'seqio'"),
        ("", "has an empty part"),
        ("{}/a.txt,", "has an empty part"),
        ("digits://", "use digits://split=train or digits://split=test"),
        ("idx://{}", "must have the form idx://DIR/split=train"),
        ("idx://{}/nowhere/split=train", "there is no directory"),
    ],
)
def test_invalid_patterns_raise(folder, pattern, message):
    with pytest.raises(data.DataError, match=message):
        data.load(pattern.replace("{}", str(folder)))


def test_empty_file_raises(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(data.DataError, match=r"a\.txt is empty"):
        data.load(f"{tmp_path}/a.txt")


def test_invalid_first_line_raises_when_loading(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xd8\xff\xe0 a picture\n")
    with pytest.raises(data.DataError, match=r"a\.txt, line 1: byte 0xff"):
        data.load(f"{tmp_path}/a.txt")


def test_dummy_has_no_data():
    assert data.filenames("dummy://") == []
    source = data.load("dummy://")
    assert len(source) == 0
    with pytest.raises(data.DataError, match="the model makes its own data"):
        source.batches(4)


def test_names_are_listed_without_reading(folder):
    names = data.filenames(f"{folder}/*.txt,tfds://mnist/split=train,dummy://")
    assert names == [f"{folder}/a.txt", f"{folder}/b.txt", "tfds://mnist/split=train"]


def test_importing_loads_no_heavy_library():
    code = (
        "import sys, tekoa.data; "
        "heavy = {'jax', 'grain', 'pyarrow', 'tensorflow', 'google.protobuf'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
