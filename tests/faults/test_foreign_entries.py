"""Entries of a run directory that are not ours: never removed, counted or followed."""

import os
import pathlib
import uuid

import numpy as np
import pytest

from tekoa.estimator.cli import compile_cache, main
from tekoa.store import t5x
from tekoa.store.commit import commit, paths
from tekoa.store.commit.lease import held
from tekoa.store.commit.retention import KeepLast
from tekoa.store.read import hold
from tekoa.store.store import Store

TINY = str(pathlib.Path(__file__).parent.parent / "estimator" / "tiny_model.py")


@pytest.fixture
def canary(tmp_path):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "thesis.txt").write_text("years of work")
    (outside / "notes.txt").write_text("more of it")
    yield outside
    assert (outside / "deep" / "thesis.txt").read_text() == "years of work"
    assert (outside / "notes.txt").read_text() == "more of it"


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def save(run, *steps, **options):
    with Store(run, **options) as store:
        for step in steps:
            store.save(step, {"params": {"w": np.full(3, float(step))}})
            store.wait()


@pytest.mark.parametrize("name", [".trash-{}", "checkpoint_3.tmp-{}", "checkpoint_3.bad-{}"])
def test_link_with_the_name_of_a_leftover_is_not_followed(run, canary, name):
    link = run / name.format(uuid.uuid4().hex)
    link.symlink_to(canary)
    save(run, 1, 2)
    assert paths.list_steps(run) == [2]
    assert link.is_symlink() == ("bad" in name)


def test_links_inside_a_leftover_are_not_followed(run, canary):
    leftover = run / f".trash-{uuid.uuid4().hex}"
    (leftover / "folder").mkdir(parents=True)
    (leftover / "folder" / "to_directory").symlink_to(canary)
    (leftover / "to_file").symlink_to(canary / "notes.txt")
    save(run, 1)
    assert not leftover.exists()


def test_step_moved_to_another_disk_is_unlinked_but_not_deleted(run, tmp_path):
    save(run, 1)
    elsewhere = tmp_path / "elsewhere"
    os.rename(paths.step_dir(run, 1), elsewhere)
    paths.step_dir(run, 1).symlink_to(elsewhere)
    content = sorted(path.name for path in elsewhere.iterdir())
    save(run, 2)
    assert paths.list_steps(run) == [2]
    assert sorted(path.name for path in elsewhere.iterdir()) == content


def test_quarantine_renames_a_link_but_not_its_target(run, canary):
    paths.step_dir(run, 5).symlink_to(canary)
    with held(run) as lease:
        commit.quarantine(lease, 5)


def test_sweep_keeps_the_directories_of_others(tmp_path, canary):
    own = tmp_path / "eval"
    own.mkdir()
    (own / ".pin-notes").mkdir()
    (own / f".pin-{uuid.uuid4().hex}").symlink_to(canary)
    hold.sweep(own)
    assert [path.name for path in own.iterdir()] == [".pin-notes"]


def test_compile_cache_keeps_links_and_files_of_others(tmp_path, canary):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "a-cache").symlink_to(canary / "notes.txt")
    (cache / "b-cache").symlink_to(canary)
    (cache / "notes.txt").write_text("mine")
    (cache / "c-cache").write_bytes(b"damaged")
    compile_cache._remove_damaged(cache)
    compile_cache.prune(cache, max_bytes=0)
    assert sorted(path.name for path in cache.iterdir()) == ["a-cache", "b-cache", "notes.txt"]


def test_page_replaces_a_link_but_not_its_target(run, canary):
    save(run, 1)
    out = run.parent / "page.html"
    out.symlink_to(canary / "notes.txt")
    assert main.main(["page", str(run), f"--out={out}"]) == 0
    assert not out.is_symlink()


def create_directory(path):
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def create_t5x(path):
    path.mkdir()
    (path / "checkpoint").write_text("not msgpack")


def create_incomplete_t5x(path):
    """A T5X step that lacks a file of an array."""
    step = int(path.name.rpartition("_")[2])
    tree = {"target": {"w": np.arange(9.0)}, "state": {"step": step}}
    t5x.write(path.parent, step, tree, axes={"target": {"w": ()}})
    (path / "tekoa.manifest").unlink()
    (path / "target.w" / "0").unlink()


def create_copied_t5x(path):
    """A T5X step under another number."""
    t5x.write(path.parent, 7, {"target": {"w": np.arange(9.0)}, "state": {"step": 7}})
    (path.with_name("checkpoint_7") / "tekoa.manifest").unlink()
    os.rename(path.with_name("checkpoint_7"), path)


FOREIGN = {
    "T5X directory that is none": ("checkpoint_1000", create_t5x),
    "incomplete T5X step": ("checkpoint_1000", create_incomplete_t5x),
    "T5X step under another number": ("checkpoint_1000", create_copied_t5x),
    "directory": ("checkpoint_1000", create_directory),
    "file": ("checkpoint_1000", lambda path: path.write_text("mine")),
    "dangling link": ("checkpoint_1000", lambda path: path.symlink_to("nowhere")),
    "full-width digits": ("checkpoint_" + chr(0xFF11) * 4, create_directory),
}


@pytest.mark.parametrize(("name", "create"), FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_entry_does_not_cost_a_step(run, name, create):
    create(run / name)
    save(run, 1, 2, 3, keep=[KeepLast(2)])
    assert [n for n in paths.list_steps(run) if n < 1000] == [2, 3]
    assert os.path.lexists(run / name)


def test_complete_t5x_step_counts(run):
    t5x.write(run, 2, {"target": {"w": np.arange(9.0)}, "state": {"step": 2}})
    (run / "checkpoint_2" / "tekoa.manifest").unlink()
    save(run, 3, keep=[KeepLast(2)])
    assert paths.list_steps(run) == [2, 3]
    save(run, 4, keep=[KeepLast(2)])
    assert paths.list_steps(run) == [3, 4]


def test_committed_step_is_kept_beside_a_higher_one(run):
    save(run, 50)
    save(run, 3)
    assert paths.list_steps(run) == [3, 50]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_commands_ignore_entries_that_are_not_directories(run, capsys, kind, monkeypatch):
    name, create = FOREIGN[kind]
    create(run / name)
    monkeypatch.chdir(run.parent)
    flags = [TINY, f"--model_dir={run}"]
    assert main.main(["train", *flags, "--train_pattern=train", "--max_train_steps=6"]) == 0
    assert main.main(["eval", *flags, "--eval_pattern=eval"]) == 0
    assert main.main(["inspect", str(run)]) == 0
    assert main.main(["page", str(run)]) == 0
    assert "1000" not in capsys.readouterr().out
