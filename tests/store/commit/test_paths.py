"""Names on disk: what counts as a step, and what is ours to remove."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekoa.store.commit import paths


@pytest.mark.parametrize(
    "name",
    ["checkpoint_", "checkpoint_-1", "checkpoint_07", "checkpoint_7 ", "xcheckpoint_7",
     "checkpoint_7.tmp-1", "checkpoint_7.orbax-checkpoint-tmp-3", "checkpoint_²"],
)  # fmt: skip
def test_only_plain_decimal_steps_are_steps(name):
    assert paths.parse_step(name) is None


def test_steps_are_listed_by_number(tmp_path):
    for name in ("checkpoint_10", "checkpoint_9", "checkpoint_0", "other", ".trash-1"):
        (tmp_path / name).mkdir()
    paths.new_dir(tmp_path, 3, "tmp").mkdir()
    assert paths.list_steps(tmp_path) == [0, 9, 10]
    assert paths.list_steps(tmp_path / "missing") == []
    assert paths.list_steps(tmp_path / ("x" * 300)) == []


def test_unfinished_directories_are_listed_by_kind(tmp_path):
    kinds = ("tmp", "bad", "trash")
    directories = {kind: paths.new_dir(tmp_path, 3, kind) for kind in kinds}
    for path in directories.values():
        path.mkdir()
    (tmp_path / "checkpoint_3.tmp-1700000000").mkdir()
    assert {kind: paths.unfinished(tmp_path, kind) for kind in directories} == {
        kind: [path] for kind, path in directories.items()
    }


@pytest.mark.parametrize(
    "path", ["/a", "..", "a/..", "./a", "a//b", "a\0", "", "x" * 300, "\ud800"]
)
def test_unsafe_paths_are_detected(path):
    assert not paths.is_safe_path(path)


PARTS = st.lists(st.text(alphabet="ab./%0\0é"), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(PARTS, PARTS)
def test_different_names_stay_different_when_joined(first, second):
    joined = [".".join(map(paths.escape, parts)) for parts in (first, second)]
    assert (joined[0] == joined[1]) == (first == second)
    assert "/" not in joined[0]


def test_a_thousand_steps_are_listed_in_order_of_number(tmp_path):
    for step in range(1000):
        (tmp_path / f"checkpoint_{step}").mkdir()
    assert paths.list_steps(tmp_path) == list(range(1000))
