"""Tables and pictures of a sweep."""

import pathlib
import xml.etree.ElementTree

from tekoa.estimator.sweep import picture
from tekoa.estimator.sweep.grid import Lane
from tekoa.estimator.sweep.lanes import Outcome

SVG = "{http://www.w3.org/2000/svg}"


def outcomes():
    values = {"0.1": 0.5, "0.01": 1.5, "1": None}
    return [
        Outcome(
            lane=Lane(name=f"rate={rate}", values={"module_config.rate": rate}, seed=0),
            directory=pathlib.Path("runs", f"rate={rate}"),
            step=20,
            metric="loss",
            value=value,
            stopped="" if value else "NaN or Inf at step 3",
        )
        for rate, value in values.items()
    ]


def test_table_has_a_line_per_lane():
    assert picture.table(outcomes()) == [
        "rate  seed  steps  loss",
        " 0.1     0     20   0.5",
        "0.01     0     20   1.5",
        "   1     0     20     -  NaN or Inf at step 3",
    ]


def test_best_point_is_marked():
    points = picture.points_of(outcomes(), "module_config.rate")
    assert points == [(0.1, 0.5), (0.01, 1.5)]
    lines = picture.drawing(points, "rate", "loss")
    assert lines[1].startswith("1.5 | *")
    assert lines[12].startswith("0.5 | ")
    assert lines[12].endswith("O")
    root = xml.etree.ElementTree.fromstring(picture.svg([("rate", points)], "loss"))
    kinds = [circle.get("class") for circle in root.iter(f"{SVG}circle")]
    assert kinds == ["b", "d"]


def test_words_and_single_values_are_not_drawn():
    outcome = outcomes()[0]
    assert picture.points_of([outcome], "module_config.rate") == []
