import zlib

import numpy as np
import pytest

from tekoa import store
from tekoa.store.commit import paths
from tekoa.store.mirror import snapshot as snapshot_lib
from tekoa.store.mirror.snapshot import snapshot


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    with store.Store(directory, keep=[store.KeepLast(9)]) as steps:
        steps.save(1, {"w": np.arange(4.0)})
    (directory / "metrics.jsonl").write_text("one\n")
    return directory


def take(run, stored=None, stamps=None, prefix="1-a"):
    with snapshot(run, stored or {}, stamps or {}, prefix=prefix, own=run.parent) as taken:
        data = {
            name: source if isinstance(source, bytes) else source.read_bytes()
            for name, source in taken.uploads.items()
        }
    return taken, data


def test_all_files_are_there_with_their_checksums(run):
    (run / f"checkpoint_2.tmp-{'0' * 32}").mkdir()
    (run / f"checkpoint_2.tmp-{'0' * 32}" / "half").write_text("x")
    (run / "writer.lease").write_text("{}")
    (run / f".run.json.{'0' * 32}").write_text("{")
    (run / "link").symlink_to(run / "metrics.jsonl")
    taken, data = take(run)
    names = {f"checkpoint_1/{name}" for name, is_dir in walk(run / "checkpoint_1") if not is_dir}
    assert taken.files.keys() == {"metrics.jsonl", *names}
    for path, (part,) in taken.files.items():
        content = (run / path).read_bytes()
        assert data[part.name] == content
        assert (part.size, part.crc) == (len(content), zlib.crc32(content))


def walk(directory):
    return snapshot_lib.durable.walk(directory)


def test_what_is_stored_is_not_uploaded_again(run):
    first, _ = take(run)
    again, data = take(run, first.files, first.stamps, prefix="1-b")
    assert (again.files, data) == (first.files, {})
    # A new process has no stamps and reads the files.
    again, data = take(run, first.files, prefix="1-b")
    assert (again.files, data) == (first.files, {})


def test_a_file_that_grew_is_uploaded_in_parts(run):
    first, _ = take(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("two\n")
    second, data = take(run, first.files, first.stamps, prefix="1-b")
    assert data == {"files/1-b/metrics.jsonl": b"two\n"}
    assert len(second.files["metrics.jsonl"]) == 2
    (run / "metrics.jsonl").write_text("ONE\n")
    third, data = take(run, second.files, second.stamps, prefix="1-c")
    assert data == {"files/1-c/metrics.jsonl": b"ONE\n"}
    assert len(third.files["metrics.jsonl"]) == 1


def test_parts_do_not_become_many(run):
    files, stamps = {}, {}
    for n in range(100):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f"{n}\n")
        taken, _ = take(run, files, stamps, prefix=f"1-{n}")
        files, stamps = taken.files, taken.stamps
    assert 1 <= len(files["metrics.jsonl"]) <= 32


def test_a_step_of_which_only_the_manifest_is_here_stays_stored(run):
    first, _ = take(run)
    for name, is_dir in list(walk(run / "checkpoint_1")):
        if not is_dir and name != paths.MANIFEST:
            (run / "checkpoint_1" / name).unlink()
    again, data = take(run, first.files, prefix="1-b")
    assert (again.files, data) == (first.files, {})


def test_another_step_of_the_same_number_is_uploaded(run):
    first, _ = take(run)
    with store.Store(run, keep=[store.KeepLast(9)]) as steps:
        steps.save(1, {"w": np.arange(5.0)}, replace=True)
    again, data = take(run, first.files, first.stamps, prefix="1-b")
    names = {path for path in again.files if path.startswith("checkpoint_1/")}
    assert {again.files[path][0].name for path in names} == data.keys()


def test_a_step_that_is_removed_meanwhile_can_still_be_uploaded(run):
    with snapshot(run, {}, {}, prefix="1-a", own=run.parent) as taken:
        store_dir = run / "checkpoint_1"
        store_dir.rename(run / f".trash-{'0' * 32}")
        snapshot_lib.durable.remove(run / f".trash-{'0' * 32}")
        sizes = {
            name: source.stat().st_size
            for name, source in taken.uploads.items()
            if not isinstance(source, bytes)
        }
    assert sizes
    assert all(
        sizes[part.name] == part.size for (part,) in taken.files.values() if part.name in sizes
    )
    assert not list(run.parent.glob(".pin-*"))


def test_points_are_not_older_than_steps(run, monkeypatch):
    """A step that is committed while files are read comes with its points."""
    original = snapshot_lib._Taker.take_file
    commits = [2]

    def commit_late(self, path):
        original(self, path)
        if commits and path == "metrics.jsonl":
            commits.pop()
            with (run / "metrics.jsonl").open("a") as file:
                file.write("two\n")
            with store.Store(run, keep=[store.KeepLast(9)]) as steps:
                steps.save(2, {"w": np.arange(4.0)})

    monkeypatch.setattr(snapshot_lib._Taker, "take_file", commit_late)
    taken, data = take(run)
    assert any(path.startswith("checkpoint_2/") for path in taken.files)
    assert data["files/1-a/metrics.jsonl"] == b"one\ntwo\n"
