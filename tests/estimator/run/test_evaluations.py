import json

import pytest

from support import hostile
from tekoa.estimator.run.evaluations import Evaluation, Evaluations
from tekoa.store import CommitId, errors


def evaluation(step, digest, start="", parent="", value=0.0):
    commit = CommitId(digest=digest, start=start, parent=parent)
    return Evaluation(step=step, commit=commit, metrics={"a": value}, wall_time=12.5)


def history(path, *rows):
    """Records rows (step, digest, start, parent); returns what each call of `append` returned."""
    evaluations = Evaluations(path)
    return [evaluations.append(evaluation(*row)) for row in rows]


def shown(path):
    return [(e.step, e.commit.digest) for e in Evaluations(path).current]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "evaluations.jsonl"


def test_evaluations_are_read_back(path):
    history(path, (10, "a", "s"), (20, "b", "s"))
    assert Evaluations(path).current == [evaluation(10, "a", "s"), evaluation(20, "b", "s")]


def test_a_huge_file_is_refused_in_bounded_memory(path):
    hostile.sparse(path)
    with pytest.raises(errors.DamagedError, match=r"evaluations\.jsonl: line 1 has 4194304 bytes"):
        Evaluations(path)


def test_what_training_has_left_x(path):
    history(path, (10, "a", "s"), (20, "b", "s"), (30, "c", "t", "a"), (40, "d", "t", "a"))
    evaluations = Evaluations(path)
    starts = [("s", 0), ("t", 10)]
    assert evaluations.follow(starts) == []
    assert evaluations.follow([*starts, ("u", 35)]) == [40]
    assert [e.step for e in evaluations.current] == [10, 30]
    assert evaluations.append(evaluation(38, "e", "t")) is None
    assert evaluations.append(evaluation(37, "f", "u")) == 37
    assert [e.step for e in evaluations.current] == [10, 30, 37]


def test_a_commit_is_new_until_it_is_evaluated(path):
    history(path, (10, "a", "s"))
    evaluations = Evaluations(path)
    assert not evaluations.is_new(10, CommitId(digest="a"))
    assert evaluations.is_new(10, CommitId(digest="b"))
    assert evaluations.is_new(20, CommitId(digest="a"))


def test_a_resumed_run_supersedes_nothing_that_it_continues(path):
    assert history(path, (10, "a", "s"), (20, "b", "s"), (30, "c", "t", "b")) == [10, 20, 21]
    assert shown(path) == [(10, "a"), (20, "b"), (30, "c")]


@pytest.mark.parametrize("step", [15, 20, 30, 40])
def test_a_roll_back_supersedes_all_later_steps_of_the_old_history(path, step):
    first = history(path, (10, "a", "s"), (20, "b", "s"), (30, "c", "s"), (step, "d", "t", "a"))[-1]
    assert first == 11
    assert shown(path) == [(10, "a"), (step, "d")]
    # The old commits may still be there.
    assert [Evaluations(path).is_new(20, CommitId(digest="b"))] == [step == 20]


def test_without_a_known_parent_the_steps_from_its_own_on_are_superseded(path):
    history(path, (10, "a", "s"), (20, "b", "s"), (30, "c", "s"), (20, "d", "t", "unknown"))
    assert shown(path) == [(10, "a"), (20, "d")]


def test_a_step_made_again_by_the_same_start_supersedes_later_ones(path):
    history(path, (10, "a", "s"), (20, "b", "s"), (30, "c", "s"), (20, "d", "s"))
    assert shown(path) == [(10, "a"), (20, "d")]


def test_an_older_step_that_appears_later_supersedes_nothing(path):
    assert history(path, (20, "b", "s"), (30, "c", "s"), (10, "a", "s")) == [20, 30, 10]
    assert shown(path) == [(10, "a"), (20, "b"), (30, "c")]


def test_an_evaluation_without_identity_counts_for_any_commit(path):
    history(path, (10, ""))
    assert not Evaluations(path).is_new(10, CommitId(digest="a"))


def test_a_line_that_was_cut_short_is_ignored_with_a_warning(path, caplog):
    history(path, (10, "a", "s"), (20, "b", "s"))
    text = path.read_text()
    n_first = text.index("\n") + 1
    for end in range(n_first + 1, len(text) - 1):
        path.write_text(text[:end])
        assert shown(path) == [(10, "a")]
    assert "ignored the line" in caplog.text
    history(path, (30, "c", "s"))
    assert shown(path) == [(10, "a"), (30, "c")]


def test_lines_that_are_not_evaluations_are_ignored(path, caplog):
    valid = {"step": 1, "commit": {"digest": "a"}, "metrics": {}, "wall_time": 1.0}
    changed = [{"step": 1e999}, {"commit": {"digest": []}}, {"commit": {"digest": "a", "start": 1}}]
    lines = [json.dumps({**valid, **change}).encode() for change in changed]
    other = [b"[1]", b'{"step": 1}', b"\xff\xfe", b'{"step":1,"commit":{"x":1},"metrics":{}}']
    other += [b"[" * 100_000]
    path.write_bytes(b"\n".join([*lines, *other]) + b"\n")
    assert shown(path) == []
    assert caplog.text.count("ignored the line") == 8
