import threading
import types

import pytest

from tekoa.loop.triggers import AtSteps, EveryChecks, EverySeconds, EverySteps


def at(step, n_completed_steps=1):
    return types.SimpleNamespace(step=step, n_completed_steps=n_completed_steps)


def test_every_steps_is_due_when_a_multiple_was_reached_or_passed():
    due = [step for step in range(1, 13) if EverySteps(5).is_due(at(step))]
    assert due == [5, 10]
    assert [EverySteps(5).is_due(at(step, 4)) for step in (4, 8, 12, 16)] == [
        False,
        True,
        True,
        True,
    ]


def test_at_steps_is_due_once_for_each_step_reached_or_passed():
    trigger = AtSteps([3, 10])
    assert [step for step in range(4, 21, 4) if trigger.is_due(at(step, 4))] == [4, 12]


def test_every_checks_is_due_at_each_nth_check_and_at_the_end():
    assert [step for step in range(0, 15, 2) if EveryChecks(3, 2, 14).is_due(at(step))] == [
        0,
        6,
        12,
        14,
    ]
    assert all(EveryChecks(1, 2, None).is_due(at(step)) for step in (0, 2, 3))


def test_a_checkpoint_of_a_stop_between_two_checks_is_no_check():
    flag = threading.Event()
    trigger = EveryChecks(1, 2, 5, flag)
    assert all(trigger.is_due(at(step)) for step in (2, 3, 5))
    flag.set()
    assert [trigger.is_due(at(step)) for step in (2, 3, 5)] == [True, False, True]


def test_every_seconds_is_due_by_its_clock():
    now = [0.0]
    trigger = EverySeconds(10, clock=lambda: now[0])
    due = []
    for now[0] in (1.0, 9.9, 10.0, 15.0, 19.9, 21.0):
        due.append(trigger.is_due(at(1)))
    assert due == [False, False, True, False, False, True]


@pytest.mark.parametrize("make", [lambda: EverySteps(0), lambda: EverySeconds(0)])
def test_intervals_must_be_positive(make):
    with pytest.raises(ValueError, match="needs"):
        make()
