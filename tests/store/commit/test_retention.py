"""A19: a step is kept if any rule selects it; NaN is never best; the newest is kept."""

import itertools
import json
import math

import pytest

from tekoa.store.commit import paths, retention

LOSSES = {1: 0.5, 2: 0.9, 3: math.nan, 4: 0.1, 5: math.inf, 6: -math.inf, 7: 0.3}
METRICS = {step: {"loss": loss} for step, loss in LOSSES.items()}


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ([retention.KeepLast(2)], {6, 7}),
        ([retention.KeepEvery(3)], {3, 6, 7}),
        ([retention.KeepBest("loss", mode="min")], {4, 7}),
        ([retention.KeepBest("loss", mode="max")], {2, 7}),
        ([retention.KeepBest("loss", mode="min", n=2)], {4, 7}),
        ([retention.KeepBest("loss", mode="min", n=10)], {1, 2, 4, 7}),
        ([retention.KeepBest("accuracy", mode="max")], {7}),
        ([retention.KeepLast(1), retention.KeepBest("loss", mode="max")], {2, 7}),
        ([], {7}),
    ],
)
def test_a_step_is_kept_if_any_rule_selects_it(tmp_path, rules, kept):
    assert set(METRICS) - set(retention.to_remove(rules, METRICS, tmp_path)) == kept


def test_best_does_not_depend_on_the_order_of_arrival(tmp_path):
    rule = retention.KeepBest("loss", mode="min")
    for order in itertools.islice(itertools.permutations(METRICS), 200):
        shuffled = {step: METRICS[step] for step in order}
        assert list(rule.select(shuffled)) == [4]


def test_ties_go_to_the_earlier_step():
    equal = {step: {"loss": 0.5} for step in (3, 1, 2)}
    assert list(retention.KeepBest("loss", mode="max").select(equal)) == [1]


def test_the_step_that_was_just_committed_stays_whatever_its_number(tmp_path):
    # Training has returned to an earlier step: the newest commit has not the highest number.
    assert retention.to_remove([retention.KeepLast(1)], METRICS, tmp_path, committed=3) == [
        *(1, 2, 4, 5, 6)
    ]


def test_keep_last_matches_the_policy_of_t5x_with_pinned_steps(golden, tmp_path):
    steps = {}
    for step, expected in json.loads((golden / "keep_policy.json").read_text()):
        paths.step_dir(tmp_path, step).mkdir()
        if "PINNED" in expected[f"checkpoint_{step}"]:
            (paths.step_dir(tmp_path, step) / "PINNED").touch()
        steps[step] = {}
        for removed in retention.to_remove([retention.KeepLast(3)], steps, tmp_path):
            del steps[removed]
        assert {f"checkpoint_{step}" for step in steps} == set(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: retention.KeepLast(0),
        lambda: retention.KeepEvery(0),
        lambda: retention.KeepBest("loss", mode="min", n=0),
        lambda: retention.KeepBest("loss", mode="lowest"),
    ],
)
def test_rules_that_keep_nothing_raise(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_an_empty_directory_has_nothing_to_remove(tmp_path):
    assert retention.to_remove([retention.KeepLast(1)], {}, tmp_path) == []
