import os

import numpy as np
import pytest

from tekoa import data
from tekoa.data import remote

fsspec = pytest.importorskip("fsspec", reason="the 'cloud' extra is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/bucket", recursive=True)


def copies():
    return sorted(path.name for path in remote.cache_dir().rglob("*") if path.is_file())


def test_files_of_a_store_are_read_with_random_access(memory):
    for name in "ab":
        rows = "".join(f'{{"x": {at}, "of": "{name}"}}\n' for at in range(5))
        memory.pipe(f"/bucket/{name}.jsonl", rows.encode())
    source = data.load("memory://bucket/*.jsonl")
    assert len(source) == 10
    batches = source.batches(4, shuffle=True, seed=1)
    rows = [next(batches)["x"].tolist() for _ in range(5)]
    again = data.load("memory://bucket/*.jsonl").batches(4, shuffle=True, seed=1)
    again.restore(batches.state())
    again.seek(2)
    assert next(again)["x"].tolist() == rows[2]
    assert copies() == ["a.jsonl", "b.jsonl"]


def test_a_changed_object_is_copied_again(memory):
    memory.pipe("/bucket/x.txt", b"one\n")
    assert data.load("memory://bucket/x.txt")[0]["text"] == "one"
    memory.pipe("/bucket/x.txt", b"two\n")
    assert data.load("memory://bucket/x.txt")[0]["text"] == "two"
    # The copy is used as long as the object is the same.
    local = data.filenames("memory://bucket/x.txt")[0]
    before = os.stat(local).st_mtime_ns
    assert data.filenames("memory://bucket/x.txt") == [local]
    assert os.stat(local).st_mtime_ns == before


@pytest.mark.parametrize("name", ["nothing.txt", "*.csv"])
def test_what_is_not_there_is_named(memory, name):
    memory.pipe("/bucket/x.txt", b"one\n")
    with pytest.raises(data.DataError, match=r"memory://bucket/.* matches no file"):
        data.load(f"memory://bucket/{name}")


def test_an_s3_server(monkeypatch, tmp_path):
    pytest.importorskip("s3fs", reason="the 'cloud' extra is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    service = server.ThreadedMotoServer(port=0, verbose=False)
    service.start()
    try:
        host, port = service.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.mkdir("digits")
        np.savez(tmp_path / "rows.npz", x=np.arange(12))
        store.put(str(tmp_path / "rows.npz"), "digits/rows.npz")
        assert next(data.load("s3://digits/*.npz").batches(12))["x"].tolist() == list(range(12))
        with pytest.raises(data.DataError, match=r"s3://digits/none\.npz"):
            data.load("s3://digits/none.npz")
    finally:
        service.stop()
