import pytest

from tekoa.extensions.base import serial, when
from tekoa.loop.triggers import EverySteps


def test_stages_run_in_order_on_what_the_one_before_gave(summary):
    process = serial(
        lambda c: c.with_metrics("a", {"x": 1.0}),
        lambda c: c.with_metrics("b", {"x": c.metrics["a"]["x"] + 1}),
    )
    given = summary()
    assert process(given).metrics == {"a": {"x": 1.0}, "b": {"x": 2.0}}
    assert given.metrics == {}


def test_series_can_stand_in_series(summary):
    seen = []
    process = serial(serial(lambda c: seen.append(1) or c), serial())
    assert process(summary()).step == 1
    assert seen == [1]


def test_a_stage_that_forgets_to_return_is_named(summary):
    def forgetful(checkpoint):
        del checkpoint

    with pytest.raises(TypeError, match=r"'forgetful' must return the checkpoint.*NoneType"):
        serial(forgetful)(summary())


def test_what_cannot_be_called_is_no_stage():
    with pytest.raises(TypeError, match="must be callable, got 3"):
        serial(3)


def test_a_trigger_decides_when_a_stage_runs(summary):
    seen = []
    process = when(EverySteps(2), lambda c: seen.append(c.step) or c)
    assert [process(summary(step)).step for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert seen == [2, 4]
