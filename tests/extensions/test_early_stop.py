import os

import pytest

from tekoa.extensions.early_stop import EarlyStopping, StopWhen
from tekoa.store import errors

NAN = float("nan")


def stopped_at(summary, values, **options):
    stops = []
    stage = EarlyStopping("loss", stop=lambda: stops.append(True), **options)
    for step, value in enumerate(values, start=1):
        stage(summary(step, eval={"loss": value}))
        if stage.should_stop:
            assert stops == [True]
            return step
    return None


@pytest.mark.parametrize(
    ("values", "options", "step"),
    [
        ([3, 2, 1, 1.5, 1.2, 1.1], {"patience": 3}, 6),
        ([3, 2, 1, 1.5, 0.5, 1.1], {"patience": 3}, None),
        ([0.1, 0.0, 0.0, 0.0], {"patience": 2}, 4),
        ([NAN, NAN], {"patience": 2}, 2),
        ([1, NAN, 0.5, NAN], {"patience": 2}, None),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5),
        ([1.0, 0.99, 0.98], {"patience": 2, "min_delta": 0.1}, 3),
    ],
)
def test_training_stops_when_the_metric_no_longer_improves(summary, values, options, step):
    assert stopped_at(summary, values, **options) == step


def test_a_missing_metric_is_an_error(summary):
    with pytest.raises(LookupError, match=r"no metric 'eval/loss'; it has \['train/mse'\]"):
        EarlyStopping("loss", patience=1)(summary(1, train={"mse": 1.0}))


def test_a_loop_that_returns_to_an_earlier_step_forgets_the_later_values(summary):
    stage = EarlyStopping("loss", patience=9)
    for step, value in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5)):
        stage(summary(step, eval={"loss": value}))
    assert stage.best == 2.5


@pytest.mark.parametrize("options", [{"patience": 0}, {"patience": 1, "mode": "best"}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        EarlyStopping("loss", **options)


def test_patience_survives_a_restart(tmp_path, summary):
    path = tmp_path / "run" / "values.json"

    def stage():
        return EarlyStopping("loss", patience=3, path=path)

    first = stage()
    for step, value in enumerate([3.0, 1.0, 2.0, 2.5], start=1):
        first(summary(step, eval={"loss": value}))
    assert first.best == 1.0
    second = stage()
    # The run resumes from step 3 and repeats step 4.
    second(summary(4, eval={"loss": 2.5}))
    assert (second.should_stop, second.best) == (False, 1.0)
    second(summary(5, eval={"loss": NAN}))
    assert second.should_stop
    assert stage().best == 1.0


@pytest.mark.parametrize("text", ["[1]", "{", '{"3": [1]}', '{"3": 1' + "0" * 400 + "}", None])
def test_another_kind_of_file_is_an_error(tmp_path, text):
    path = tmp_path / "file"
    os.mkfifo(path) if text is None else path.write_text(text)
    with pytest.raises(errors.DamagedError, match="was not written by EarlyStopping or StopWhen"):
        EarlyStopping("loss", patience=1, path=path)


@pytest.mark.parametrize(
    ("condition", "step"),
    [("loss<1", 3), ("loss <= 1.0", 2), ("loss>1e9", None), ("loss >= 3", 1), ("loss<-inf", None)],
)
def test_training_stops_at_the_first_value_that_meets_the_condition(summary, condition, step):
    stage = StopWhen(condition)
    reached = None
    for i, value in enumerate([3.0, 1.0, 0.5, NAN, 0.1], start=1):
        stage(summary(i, eval={"loss": value}))
        reached = i if stage.should_stop and reached is None else reached
    assert reached == step


def test_a_reached_value_survives_a_restart_and_a_rewind_forgets_it(tmp_path, summary):
    stops = []
    stage = StopWhen("loss<1", stop=lambda: stops.append(1), path=tmp_path / "values.json")
    for step, value in enumerate([3.0, 0.5], start=1):
        stage(summary(step, eval={"loss": value}))
    assert (stops, stage.reason) == ([1], "loss is 0.5, < 1")
    assert StopWhen("loss<1", path=tmp_path / "values.json").resume(2)
    assert not StopWhen("loss<1", path=tmp_path / "values.json").resume(1)
    assert not StopWhen("loss<0.1", path=tmp_path / "values.json").resume(2)


@pytest.mark.parametrize(
    "condition", ["loss", "loss=1", "loss==1", "<1", "loss<", "loss<nan", "a b<1"]
)
def test_conditions_of_another_form_are_refused(condition):
    with pytest.raises(ValueError, match="A condition is a metric"):
        StopWhen(condition)
