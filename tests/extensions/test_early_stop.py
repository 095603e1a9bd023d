import pytest

from tekoa.extensions.early_stop import EarlyStopping

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
def test_stops_after_so_many_without_improvement(summary, values, options, step):
    assert stopped_at(summary, values, **options) == step


def test_a_metric_that_is_not_there_is_named(summary):
    with pytest.raises(KeyError, match=r"looks for eval/loss.*\['train/mse'\]"):
        EarlyStopping("loss", patience=1)(summary(1, train={"mse": 1.0}))


@pytest.mark.parametrize("options", [{"patience": 0}, {"patience": 1, "mode": "best"}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        EarlyStopping("loss", **options)
