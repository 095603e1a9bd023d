import gzip
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tekoa import data
from tekoa.data.readers import lines
from tekoa.data.readers.base import RowRequest, length

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=12)


def reader(*paths):
    return lines.LineReader([str(path) for path in paths], lines.text_example)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few bytes, so that short files have many of them."""
    monkeypatch.setattr(lines, "BLOCK", 8)
    monkeypatch.setattr(lines, "_SCAN_BLOCKS", 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(TEXT, min_size=1, max_size=20), min_size=1, max_size=3), st.booleans())
def test_lines_match_those_of_python(tmp_path, small_blocks, files, ends_in_newline):
    expected, paths = [], []
    for at, texts in enumerate(files):
        path = tmp_path / f"{at}.txt"
        # A last empty line is one only if a newline follows it.
        content = "\n".join(texts) + ("\n" if ends_in_newline or not texts[-1] else "")
        path.write_text(content, encoding="utf-8", newline="")
        expected += texts
        paths.append(path)
    read = reader(*paths)
    order = np.random.default_rng(0).permutation(len(expected))
    assert read.gather(RowRequest.of_rows(order))["text"].tolist() == [expected[at] for at in order]
    assert length(read) == len(expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 199), st.data())
def test_resumed_index_returns_the_same_lines(tmp_path, small_blocks, row, choice):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{at}\n" for at in range(200)))
    first = reader(path)
    first.reach(choice.draw(st.sampled_from([1, 100, 1000])))
    note = first.anchor((0, row))
    again = reader(path)
    again.resume(note)
    for other in (row, 199, 0, row):
        assert again.gather(RowRequest.of_rows([other]))["text"].tolist() == [str(other)]
    assert length(again) == 200


def test_reading_in_order_indexes_no_further(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("some words in a line\n" * 400_000)
    read_bytes = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read_bytes.append(n) or pread(fd, n, at))
    next(data.load(str(path)).batches(32))
    assert sum(read_bytes) < 3 * lines.BLOCK * lines._SCAN_BLOCKS
    assert path.stat().st_size > 2 * sum(read_bytes)


def test_lines_may_be_longer_than_blocks(tmp_path, small_blocks):
    path = tmp_path / "long.txt"
    texts = ["a" * 100, "", "b" * 7, "c" * 8, "d" * 9, "e" * 1000]
    path.write_text("\n".join(texts))
    assert reader(path).gather(RowRequest.of_rows(range(6)))["text"].tolist() == texts


def test_windows_line_endings_are_removed(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"one\r\ntwo\r\n")
    assert [example["text"] for example in data.load(str(path))] == ["one", "two"]


def test_compressed_text_has_the_same_lines(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\nthree"))
    source = data.load(str(path))
    assert [example["text"] for example in source] == ["one", "two", "three"]
    assert source[2]["text"] == "three"


def test_bad_utf8_names_file_line_and_column(tmp_path):
    good, bad = tmp_path / "a.txt", tmp_path / "b.txt"
    good.write_text("fine\n" * 5)
    bad.write_bytes(b"fine\n" * 3 + b"caf\xe9\n" + b"fine\n")
    source = data.load([str(good), str(bad)])
    with pytest.raises(data.DataError, match=r"b\.txt, line 4: byte 0xe9 at column 4 is not UTF-8"):
        list(source.batches(3, epochs=1))


def test_line_numbers_are_right_far_into_a_file(tmp_path, small_blocks):
    path = tmp_path / "a.txt"
    path.write_bytes(b"ok\n" * 137 + b"\xff\n" + b"ok\n" * 5)
    with pytest.raises(data.DataError, match=r"a\.txt, line 138: byte 0xff"):
        reader(path).gather(RowRequest.of_rows([137]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'x': 1}", "line 2: Expecting property name"),
        ("", "line 2: the line is blank"),
        ("[1, 2]", "line 2: expected a JSON object, got"),
        ('{"x": [[1, 2], [3]]}', "line 2: .*inhomogeneous"),
    ],
)
def test_bad_json_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"x": 1}}\n{line}\n{{"x": 3}}\n')
    with pytest.raises(data.DataError, match=r"a\.jsonl, " + message):
        list(data.load(str(path)))


def test_json_lists_become_arrays(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": [1, 2.5], "words": ["a", "b"], "deep": {"y": true}}\n' * 2)
    batch = next(data.load(str(path)).batches(2))
    assert batch["x"].tolist() == [[1, 2.5], [1, 2.5]]
    assert batch["words"].tolist() == [["a", "b"], ["a", "b"]]
    assert batch["deep"]["y"].tolist() == [True, True]


def test_file_truncated_while_being_read_raises(tmp_path, small_blocks):
    path = tmp_path / "a.txt"
    path.write_text("ab\n" * 100)
    read = reader(path)
    read.reach(3)
    path.write_text("ab\n" * 2)
    with pytest.raises(data.DataError, match="was truncated while being read: it had 300 bytes"):
        read.reach(90)
    with pytest.raises(data.DataError, match="was truncated while being read: it had 300 bytes"):
        read.gather(RowRequest.of_rows([20]))


@pytest.mark.slow
def test_ten_million_lines_take_little_memory(tmp_path):
    import subprocess
    import sys

    path = tmp_path / "big.txt"
    with open(path, "w") as file:
        for start in range(0, 10**7, 10**5):
            file.write(
                "".join(f"line {at} with a few words\n" for at in range(start, start + 10**5))
            )
    code = f"""
import resource
from tekoa import data
import numpy.random
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
batch = next(data.load({str(path)!r}).batches(32, shuffle=True))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert len(set(batch["text"].tolist())) == 32
assert grown < 30_000, grown
"""
    subprocess.run([sys.executable, "-c", code], check=True)
