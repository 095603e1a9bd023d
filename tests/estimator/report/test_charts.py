import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest

from tekoa.estimator.report import charts
from tekoa.estimator.report.charts import Series


def parse(svg):
    return ET.fromstring(svg)


def path_of(svg, color=1):
    (path,) = [p for p in parse(svg).iter("path") if p.get("class") == f"line c{color}"]
    return path


def coordinates(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d"))]


def test_points_are_drawn_at_their_values():
    svg = charts.chart([Series("a", 1, [(0, 0.0), (5, 0.5), (10, 1.0)])], label="", last_step=10)
    (x0, y0), (x1, y1), (x2, y2) = coordinates(path_of(svg))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert (x0, x2) == (charts.LEFT, charts.WIDTH - charts.RIGHT)
    assert y2 < y1 < y0


def test_logarithmic_axis_spaces_decades_equally():
    svg = charts.chart(
        [Series("a", 1, [(0, 0.01), (1, 0.1), (2, 1.0), (3, 10.0)])], label="", last_step=3
    )
    ys = [y for _, y in coordinates(path_of(svg))]
    gaps = [a - b for a, b in itertools.pairwise(ys)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2)


def test_nan_and_inf_interrupt_the_curve():
    points = [(0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf), (4, 1.5)]
    path = path_of(charts.chart([Series("a", 1, points)], label="", last_step=4))
    assert path.get("d").count("M") == 3
    assert "L" not in path.get("d")


def test_curve_without_finite_values_shows_a_message():
    assert "No finite values" in charts.chart(
        [Series("a", 1, [(0, math.nan)])], label="", last_step=0
    )


@pytest.mark.parametrize(
    "points", [[(0, 0.0)], [(7, -3.0), (8, -3.0)], [(0, 1e-30), (1, 1e30)], [(0, 0.0), (1, 1e-12)]]
)
def test_unusual_ranges_stay_within_the_chart(points):
    svg = charts.chart([Series("a<b", 1, points)], label='x"y', last_step=points[-1][0])
    height = float(parse(svg).get("viewBox").split()[3])
    for _, y in coordinates(path_of(svg)):
        assert 0 <= y <= height


def test_thinning_a_long_curve_keeps_its_extremes():
    points = [(i, math.sin(i / 50)) for i in range(10_000)]
    points[1234] = (1234, 99.0)
    thinned = charts.thin_out(points)
    assert len(thinned) <= charts.MAX_POINTS + 2
    assert (1234, 99.0) in thinned
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]


def test_sparkline_shows_the_target():
    assert 'class="goal"' in charts.sparkline([(0, 1.0), (1, 2.0)], 1.5)
    assert 'class="goal"' not in charts.sparkline([(0, 1.0), (1, 2.0)], None)
    assert charts.sparkline([(0, math.nan)], 1.0) == ""
