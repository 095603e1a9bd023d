"""Malformed files for every reader of data: one message that names the file, in bounded memory."""

import gzip
import io
import pathlib
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from support import hostile
from tekoa import data

MAX_GROWN = 256 * 2**20


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def npy(header, body=b""):
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def archive(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return buffer.getvalue()


GOOD = npz(x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
F8 = "{'descr': '<f8', 'fortran_order': False, 'shape': %s, }"
OBJECT = "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"

CORPUS = {
    "a.npz": {
        "text": b"no archive",
        "cut off": GOOD[:-30],
        "changed": GOOD[:90] + bytes(10) + GOOD[100:],
        "huge shape": archive(x=npy(F8 % "(1099511627776,)", bytes(8))),
        "negative shape": archive(x=npy(F8 % "(-1,)", bytes(8))),
        "shape of 2**80": archive(x=npy(F8 % "(1048576,) * 4", bytes(8))),
        "objects": archive(x=npy(OBJECT, b"\x80\x04N.")),
        "code as header": archive(x=npy("__import__('os').getpid()")),
        "open header": archive(x=npy("{'descr': '<f8', ")),
        "indented header": archive(x=npy("1\n  2\n 3")),
        "no array": archive(x=b"text"),
        "empty archive": archive(),
    },
    "a.csv": {
        "zeros": bytes(100),
        "one header twice": b"a,a\n1,2\n",
        "not text": b"a,b\n\xff\xfe,\xfa\n",
        "header is not text": b"\xff\xfe,b\n1,2\n",
        "short row": b"a,b\n1\n",
        "short row that is not text": b"a,b\n\xff\n",
        "open quote": b'a,b\n"1,2\n3,4\n',
        "only a header": b"a,b\n",
    },
    "a.jsonl": {
        "no JSON": b"no JSON\n",
        "no object": b"[1]\n",
        "deep": b'{"a": ' + b"[" * 100_000 + b"\n",
        "ragged": b'{"a": [[1], [2, 3]]}\n',
        "long number": b'{"a": ' + b"9" * 5000 + b"}\n",
        "not text": b'{"a": "\xff"}\n',
        "blank": b"\n",
    },
    "a.parquet": {
        "text": b"no parquet file, but long enough to have a footer",
        "magic only": b"PAR1PAR1",
        "footer too long": b"PAR1" + bytes(40) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "garbage footer": b"PAR1" + b"\xff" * 40 + struct.pack("<I", 36) + b"PAR1",
    },
    "a.tfrecord": {
        "text": b"no record file, but long enough for a header" * 3,
        "cut off": struct.pack("<Q", 5),
        "zeros": bytes(1000),
    },
    "a.array_record": {"text": b"no record file" * 100, "zeros": bytes(2**17)},
    "a.txt.gz": {
        "text": b"not compressed\n",
        "cut off": gzip.compress(b"a b c\n" * 1000)[:-20],
        "changed": gzip.compress(b"a b c\n" * 1000)[:20] + bytes(20),
    },
}
IDX = {
    "text": b"no IDX file",
    "huge": struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 2**31),
    "cut off": struct.pack(">HBB3I", 0, 8, 3, 5, 2, 2) + bytes(19),
    "too long": struct.pack(">HBB3I", 0, 8, 3, 5, 2, 2) + bytes(21),
    "many dimensions": struct.pack(">HBB", 0, 8, 200) + struct.pack(">200I", *[1] * 200) + b"x",
    "nothing times huge": struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 0),
    "no sizes": struct.pack(">HBB", 0, 8, 3),
}
CASES = [(name, kind, text) for name, texts in CORPUS.items() for kind, text in texts.items()]


def load(pattern):
    source = data.load(pattern)
    return [source[0], source[len(source) - 1], source.info]


@pytest.fixture
def bounded():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_GROWN


@pytest.mark.parametrize(("name", "kind", "text"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_malformed_file_is_one_message(tmp_path, bounded, capfd, name, kind, text):
    if name == "a.array_record":
        pytest.importorskip("grain")
    (tmp_path / name).write_bytes(text)
    with pytest.raises(data.DataError) as raised:
        load(str(tmp_path / name))
    assert name in str(raised.value)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("kind", IDX)
def test_malformed_idx_file_is_one_message(tmp_path, bounded, kind, ending):
    name = f"train-images-idx3-ubyte{ending}"
    (tmp_path / name).write_bytes(gzip.compress(IDX[kind]) if ending else IDX[kind])
    labels = struct.pack(">HBBI", 0, 8, 1, 5) + bytes(5)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(data.DataError, match=name):
        load(f"idx://{tmp_path}/split=train")


@pytest.mark.parametrize("name", [name for name in CORPUS if not name.endswith(".gz")])
def test_sparse_file_is_one_message(tmp_path, bounded, name):
    hostile.sparse(tmp_path / name)
    with pytest.raises(data.DataError, match=name):
        load(str(tmp_path / name))


def test_array_record_file_damaged_behind_its_first_record_is_one_message(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a.array_record"
    writer = module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in (b"first", b"second", b"third"):
        writer.write(record)
    writer.close()
    path.write_bytes(path.read_bytes().replace(b"second", b"zecond"))
    source = data.load(str(path))
    with pytest.raises(data.DataError, match=r"a\.array_record: cannot read the records 1"):
        source[1]


@pytest.mark.parametrize("name", [*CORPUS, "a.txt"])
@pytest.mark.parametrize("kind", hostile.IRREGULAR)
def test_what_is_not_a_file_is_one_message(tmp_path, name, kind):
    hostile.IRREGULAR[kind](tmp_path / name)
    with pytest.raises(data.DataError, match=name):
        load(str(tmp_path / name))


def test_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "b.npz").write_bytes(GOOD)
    pathlib.Path(tmp_path / "a.npz").symlink_to("b.npz")
    assert len(data.load(str(tmp_path / "a.npz"))) == 3
