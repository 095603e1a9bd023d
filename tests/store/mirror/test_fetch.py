import zlib

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.mirror import fetch
from tekoa.store.mirror.head import Head, Part
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.snapshot import snapshot


@pytest.fixture
def published(url, tmp_path):
    """A run with three steps in a store: its objects, its head and the original directory."""
    original = tmp_path / "original"
    with store.Store(original, keep=[store.KeepLast(9)]) as steps:
        for step in (1, 2, 3):
            steps.save(step, {"w": np.full(4, float(step))})
    (original / "run.json").write_text("{}")
    objects = Objects(url)
    with snapshot(original, {}, {}, prefix="1-a", own=tmp_path) as taken:
        objects.upload(taken.uploads, lambda: None)
    return objects, Head(id="a", files=taken.files), original


def fetch_small(objects, head, directory):
    return list(fetch.fetch_files(objects, head, directory, fetch.small_files(head)).values())


def test_at_first_steps_are_downloaded_in_part(published, tmp_path):
    objects, head, _ = published
    assert fetch_small(objects, head, tmp_path / "copy") == []
    names = {p.relative_to(tmp_path / "copy").as_posix() for p in (tmp_path / "copy").rglob("*.*")}
    steps = [f"checkpoint_{n}/tekoa.{kind}" for n in (1, 2, 3) for kind in ("json", "manifest")]
    assert names == {"run.json", *steps}


def test_only_the_newest_step_is_completed(published, tmp_path):
    objects, head, _ = published
    fetch_small(objects, head, tmp_path / "copy")
    assert fetch.fetch_newest(objects, head, tmp_path / "copy") == []
    assert store.load(tmp_path / "copy")["w"].tolist() == [3.0] * 4
    with pytest.raises(errors.DamagedError, match="missing"):
        store.load(tmp_path / "copy", step=2)
    assert fetch.fetch_step(objects, head, tmp_path / "copy", "checkpoint_2") == []
    assert store.load(tmp_path / "copy", step=2)["w"].tolist() == [2.0] * 4


def test_every_damaged_or_missing_object_of_a_step_leads_to_the_one_before(published, tmp_path):
    objects, head, _ = published
    names = [path for path in head.files if path.startswith("checkpoint_3/")]
    assert len(names) > 4
    for at, path in enumerate(names):
        (part,) = head.files[path]
        data = objects.download(part.name)
        for damage in ("flip", "cut", "delete"):
            copy = tmp_path / f"copy-{at}-{damage}"
            objects.delete([part.name])
            if damage != "delete":
                bad = bytes([data[0] ^ 1, *data[1:]]) if damage == "flip" else data[:-1]
                objects.upload({part.name: bad}, lambda: None)
            problems = fetch_small(objects, head, copy)
            problems += fetch.fetch_newest(objects, head, copy)
            assert f"{path} is damaged" in problems[0]
            assert part.name in problems[0]
            assert store.load(copy)["w"].tolist() == [2.0] * 4
        objects.upload({part.name: data}, lambda: None)


@pytest.mark.parametrize(("damage", "left"), [(b"[]", b"[]"), (b"{", b"{"), (None, None)])
def test_a_damaged_file_of_the_run_is_reported_and_read_as_it_is(published, tmp_path, damage, left):
    objects, head, _ = published
    name = head.files["run.json"][0].name
    objects.delete([name])
    if damage is not None:
        objects.upload({name: damage}, lambda: None)
    (problem,) = fetch_small(objects, head, tmp_path / "copy")
    assert "run.json is damaged" in problem
    assert objects.at(name) in problem
    path = tmp_path / "copy" / "run.json"
    assert (path.read_bytes() if path.exists() else None) == left


def test_files_in_parts_are_joined(url, tmp_path):
    objects = Objects(url)
    objects.upload({"a": b"one\n", "b": b"two\n"}, lambda: None)
    parts = (Part("a", 4, zlib.crc32(b"one\n")), Part("b", 4, zlib.crc32(b"two\n")))
    head = Head(files={"m": parts, "empty": ()})
    fetch_small(objects, head, tmp_path)
    assert (tmp_path / "m").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "empty").read_bytes() == b""
    objects.upload({"a": b"oNe\n"}, lambda: None)
    (tmp_path / "m").unlink()
    (problem,) = fetch_small(objects, head, tmp_path)
    assert "m is damaged: the checksum of memory://bucket/run/a does" in problem
    assert (tmp_path / "m").read_bytes() == b"oNe\ntwo\n"
    objects.delete(["a"])
    (problem,) = fetch_small(objects, head, tmp_path)
    assert "the object memory://bucket/run/a is missing" in problem
    assert (tmp_path / "m").read_bytes() == b"two\n"


def test_files_that_are_here_are_not_downloaded(published, tmp_path, monkeypatch):
    objects, head, _ = published
    fetch_small(objects, head, tmp_path / "copy")
    (tmp_path / "copy" / "run.json").write_text("changed")
    fetch_small(objects, head, tmp_path / "copy")
    assert (tmp_path / "copy" / "run.json").read_text() == "{}"
    monkeypatch.setattr(Objects, "download_to", None)
    fetch_small(objects, head, tmp_path / "copy")
