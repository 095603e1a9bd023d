import pathlib

import pytest

from tekoa.estimator.report import sections
from tekoa.estimator.report.events import Point
from tekoa.estimator.report.facts import Best, RunFacts


def facts(curves=None, **changes):
    values = {
        "directory": pathlib.Path("/runs/r"),
        "record": {},
        "end_step": None,
        "is_running": False,
        "curves": curves or {},
        "checkpoints": {},
        "best": [],
    }
    return RunFacts(**{**values, **changes})


def line(*values, start=0, seconds=1.0):
    return [Point(10 * i, seconds * i, v, start) for i, v in enumerate(values, start=1)]


def test_training_validation_and_evaluators_share_the_chart_of_a_metric():
    charts = sections.metric_charts(
        facts(
            {
                "train": {
                    "train/loss": line(1.0),
                    "train/valid_loss": line(2.0),
                    "train/seconds_per_step": line(0.1),
                    "train/weights_l2norm": line(5.0),
                    "train/valid_acc": line(0.5),
                    "params/w ()": line(1.0),
                    "rates/bias": line(0.1),
                    "gradient_norms/dense/kernel": line(0.1),
                    "eval/loss": line(3.0),
                    "eval/clean/acc": line(0.7),
                },
                "dev/one": {"dev/acc": line(0.6)},
            }
        )
    )
    assert {name: list(by) for name, by in charts.items()} == {
        "loss": ["train", "valid", "eval"],
        "acc": ["valid", "eval/clean", "dev/one"],
        "gradient_norms": ["dense/kernel"],
        "rates": ["bias"],
        "weights_l2norm": ["train"],
    }
    assert list(charts) == ["loss", "acc", "gradient_norms", "rates", "weights_l2norm"]


def test_best_checkpoint_is_marked_only_on_its_own_curve():
    best = Best(place="eval/high_acc", metric="acc", score="0.7", step=20)
    page = sections.curves(
        facts(
            {"eval": {"eval/acc": line(0.1, 0.7)}, "train": {"train/valid_acc": line(0.2, 0.3)}},
            best=[best],
        )
    )
    assert page.count('class="best"') == 1


def test_parameters_are_compared_with_their_eta():
    curves = {"train": {"params/dense/kernel (2, 3)": line(0.1, 0.2)}}
    page = sections.parameters(facts(curves, record={"scales": {"dense/kernel": 0.4}}))
    assert "0.4" in page
    assert ">0.5<" in page  # RMS over eta.
    assert 'class="goal"' in page
    plain = sections.parameters(facts(curves))
    assert "eta" not in plain
    assert "0.2" in plain
    # A run of `fit` does not log them.
    assert sections.parameters(facts({"train": {"train/loss": line(0.1, 0.2)}})) == ""


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_compared_stay_blank(value):
    curves = {"train": {"params/w ()": line(value)}}
    page = sections.parameters(facts(curves, record={"scales": {"w": 0.4}}))
    assert 'class="gauge"' not in page


def test_time_between_processes_is_not_counted():
    # Ten steps of 0.05 s per second, and 100 seconds between the two processes.
    first = [Point(10, 0.0, 0.05, 0), Point(20, 1.0, 0.05, 0)]
    second = [Point(30, 101.0, 0.05, 1), Point(40, 102.0, 0.05, 1)]
    run = facts({"train": {"train/seconds_per_step": first + second}})
    inside, outside = sections.seconds(run)
    assert inside == pytest.approx(40 * 0.05)
    assert outside == pytest.approx(2 * 0.5)
    assert "starts of the training process" in sections.timings(run)


def test_what_the_run_measured_of_itself_is_listed():
    system = {
        "train/seconds_per_step": line(0.1, 0.1),
        "system/data_seconds": line(1.0, 2.0),
        "system/examples_per_second": line(100.0, 300.0),
        "system/flops_utilisation": line(0.25),
        "system/host_bytes": line(2e9, 1e9),
    }
    rows = dict(sections._system(facts({"train": system})))
    assert list(rows.values()) == ["3.0 s", "200", "0.25", "2.00 GB"]
    assert "examples per second" in sections.timings(facts({"train": system}))
    assert not dict(sections._system(facts()))


def test_norms_of_parameters_are_no_columns_of_checkpoints():
    curves = {"train": {"train/loss": line(1.0), "gradient_norms/dense/kernel": line(0.1)}}
    assert list(sections._score_columns(facts(curves))) == ["train loss"]


def test_settings_are_flattened_and_default_flags_omitted():
    record = {
        "model": "my.model",
        "random_seed": 7,
        "settings": {"opt": {"rate": 0.1}, "name": "<b>"},
        "flags": {"max_ckpt": 7, "max_save": 3, "ema": None, "overrides": {"a": "b"}},
        "command": ["/bin/tekoa", "train", "mnist"],
        "versions": {"jax": "1"},
    }
    page = sections.settings(facts(record=record))
    for words in ["opt.rate", "&lt;b&gt;", "max_ckpt", "tekoa train mnist", "my.model", "jax 1"]:
        assert words in page
    for words in ["max_save", "ema", "overrides", "<b>", "/bin"]:
        assert words not in page


@pytest.mark.parametrize("section", ["curves", "checkpoints", "timings", "settings"])
def test_section_of_an_empty_run_says_so(section):
    assert 'class="empty"' in getattr(sections, section)(facts())
