import pytest

from tekoa.extensions.serial import serial, when
from tekoa.loop.triggers import EverySteps


def test_each_stage_receives_the_result_of_the_previous_one(summary):
    process = serial(
        lambda c: c.with_metrics("a", {"x": 1.0}),
        lambda c: c.with_metrics("b", {"x": c.metrics["a"]["x"] + 1}),
    )
    checkpoint = summary()
    assert process(checkpoint).metrics == {"a": {"x": 1.0}, "b": {"x": 2.0}}
    assert checkpoint.metrics == {}


def test_serial_can_be_nested(summary):
    calls = []
    process = serial(serial(lambda c: calls.append(1) or c), serial())
    assert process(summary()).step == 1
    assert calls == [1]


def test_a_stage_that_returns_nothing_is_an_error(summary):
    def forgetful(checkpoint):
        del checkpoint

    with pytest.raises(TypeError, match=r"'forgetful' must return the checkpoint.*NoneType"):
        serial(forgetful)(summary())


def test_a_stage_must_be_callable():
    with pytest.raises(TypeError, match="must be callable, got 3"):
        serial(3)


def test_a_trigger_decides_when_a_stage_runs(summary):
    steps = []
    process = when(EverySteps(2), lambda c: steps.append(c.step) or c)
    assert [process(summary(step)).step for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert steps == [2, 4]
