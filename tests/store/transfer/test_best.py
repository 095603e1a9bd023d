"""The best copies: score and model belong together, whenever the program is killed."""

import json
import math
import os

import numpy as np
import pytest

from support.killed import Killed, kill_at
from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import durable, paths
from tekoa.store.transfer import copy
from tekoa.store.transfer.best import SCORES, BestCopies

# The changes that the best copies make to their directory.
CHANGES = ((durable, "replace"), (copy, "copy_step"), (durable, "exchange"), (os, "rename"))


def save(directory, step, value):
    with store.Store(directory, keep=[store.KeepEvery(1)]) as writer:
        writer.save(step, {"model_params": np.float32(value)}, replace=True)
    return paths.step_dir(directory, step)


def models(directory):
    """Returns the values of the models that are kept, by step."""
    steps = paths.list_steps(directory)
    return {step: float(store.load(directory, step=step)["model_params"]) for step in steps}


def offer(tmp_path, step, value, **options):
    options = {"mode": "max", "keep": 1, **options}
    best = BestCopies(tmp_path / "best", **options)
    return best.offer(save(tmp_path / "run", step, value), value)


@pytest.mark.parametrize(
    ("mode", "values", "kept"),
    [
        ("max", [0.5, 0.75, math.nan, 0.25, math.inf], {1: 0.5, 2: 0.75}),
        ("min", [0.5, 0.75, 0.25, 0.0, -math.inf], {3: 0.25, 4: 0.0}),
    ],
)
def test_the_best_are_kept_over_restarts(tmp_path, mode, values, kept):
    for step, value in enumerate(values, start=1):
        offer(tmp_path, step, value, mode=mode, keep=2)
    assert models(tmp_path / "best") == kept
    best = BestCopies(tmp_path / "best", mode=mode, keep=2)
    assert best.scores == kept
    assert float((tmp_path / "best" / "score").read_text()) == best.best


@pytest.mark.parametrize("keep", [1, 3])
def test_a_better_step_with_a_lower_number_is_the_newest(tmp_path, keep):
    for step, value in ((10, 1.0), (20, 2.0), (30, 3.0), (20, 4.0)):
        assert offer(tmp_path, step, value, keep=keep)
    assert models(tmp_path / "best") == ({20: 4.0} if keep == 1 else {10: 1.0, 20: 4.0})
    assert not offer(tmp_path, 40, 3.5)


def test_a_worse_commit_of_a_kept_step_changes_nothing(tmp_path):
    offer(tmp_path, 10, 2.0)
    assert not offer(tmp_path, 10, 1.0)
    assert models(tmp_path / "best") == {10: 2.0}


@pytest.mark.parametrize(("second", "keep"), [((10, 5.0), 1), ((20, 5.0), 2), ((30, 5.0), 1)])
def test_scores_belong_to_the_models_after_a_kill_at_any_change(tmp_path, second, keep):
    for n in range(1, 100):
        directory = tmp_path / f"{n}"
        for step, value in ((10, 1.0), (20, 2.0)):
            offer(directory, step, value, keep=keep)
        with pytest.MonkeyPatch.context() as patch:
            path = save(directory / "run", *second)
            best = BestCopies(directory / "best", mode="max", keep=keep)
            kill_at(patch, n, CHANGES)
            try:
                best.offer(path, second[1])
            except Killed:
                is_killed = True
            else:
                is_killed = False
        restarted = BestCopies(directory / "best", mode="max", keep=keep)
        in_models = models(directory / "best")
        assert restarted.scores.items() <= in_models.items()
        assert restarted.best == max(in_models.values())
        restarted.repair()
        assert restarted.scores == models(directory / "best")
        assert float((directory / "best" / "score").read_text()) == restarted.best
        if not is_killed:
            break
    assert n > 4
    assert restarted.best == 5.0


def test_the_score_of_an_earlier_version_belongs_to_the_newest_copy(tmp_path):
    copy.copy_step(save(tmp_path / "run", 10, 1.0), tmp_path / "best")
    copy.copy_step(save(tmp_path / "run", 20, 2.0), tmp_path / "best")
    (tmp_path / "best" / "score").write_text("2.0")
    assert BestCopies(tmp_path / "best", mode="max", keep=2).scores == {20: 2.0}
    assert not offer(tmp_path, 30, 1.5)
    assert offer(tmp_path, 30, 3.0, keep=2)
    assert models(tmp_path / "best") == {20: 2.0, 30: 3.0}


def test_a_deleted_copy_has_no_score(tmp_path):
    offer(tmp_path, 10, 2.0)
    os.rename(tmp_path / "best" / "checkpoint_10", tmp_path / "elsewhere")
    assert BestCopies(tmp_path / "best", mode="max", keep=1).best is None
    assert offer(tmp_path, 20, 1.0)


@pytest.mark.parametrize("text", ["", "3", '[{"step": 1}]', '[{"step": 1, "commit": 2}]'])
def test_unreadable_scores_are_an_error_that_names_the_file(tmp_path, text):
    offer(tmp_path, 10, 2.0)
    (tmp_path / "best" / SCORES).write_text(text)
    with pytest.raises(errors.DamagedError, match=r"scores\.json: cannot be read"):
        BestCopies(tmp_path / "best", mode="max", keep=1)


def test_pinned_and_foreign_directories_stay(tmp_path):
    offer(tmp_path, 10, 1.0)
    (tmp_path / "best" / "checkpoint_10" / "PINNED").touch()
    (tmp_path / "best" / "checkpoint_99").mkdir()
    offer(tmp_path, 20, 2.0)
    offer(tmp_path, 30, 3.0)
    assert paths.list_steps(tmp_path / "best") == [10, 30, 99]
    assert [row["step"] for row in json.loads((tmp_path / "best" / SCORES).read_text())] == [30]
