import math

import pytest

from tekoa.fitting.history import History

ROWS = [
    {"step": 1, "seconds": 0.1, "train/loss": 2.0},
    {"step": 2, "seconds": 0.1, "train/loss": 1.0, "eval/loss": None, "eval/accuracy": 0.5},
]


def test_columns_are_lists_with_nan_where_there_is_no_value():
    history = History(ROWS)
    assert history.steps == [1, 2]
    assert history["train/loss"] == [2.0, 1.0]
    assert [math.isnan(x) for x in history["eval/loss"]] == [True, True]
    assert history.columns == ["seconds", "train/loss", "eval/loss", "eval/accuracy"]
    with pytest.raises(KeyError, match="There are seconds, train/loss"):
        _ = history["loss"]


def test_it_is_shown_as_a_table():
    history = History(ROWS)
    assert repr(history) == "<History of 2 checkpoints, steps 1 to 2>"
    assert str(history).splitlines()[-1].split() == ["2", "1", "0.5"]
    assert "<th>eval/accuracy</th>" in history._repr_html_()
    assert repr(History([])) == "<History of 0 checkpoints, empty>"


def test_the_plot_has_one_chart_per_metric_with_its_points():
    pytest.importorskip("matplotlib")
    figure = History(ROWS).plot()
    charts = {axes.get_title(): axes for axes in figure.axes}
    assert sorted(charts) == ["accuracy", "loss"]
    lines = {line.get_label(): line for line in charts["loss"].lines}
    assert list(lines["train"].get_ydata()) == [2.0, 1.0]
    assert [axes.get_title() for axes in History(ROWS).plot("train/loss").axes] == ["loss"]
