import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest

from tekoa.estimator import page_chart
from tekoa.estimator.page_chart import Series


def parsed(svg):
    return ET.fromstring(svg)


def path_of(svg, color=1):
    (found,) = [p for p in parsed(svg).iter("path") if p.get("class") == f"line c{color}"]
    return found


def places(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d"))]


def test_points_stand_where_their_numbers_say():
    svg = page_chart.chart(
        [Series("a", 1, [(0, 0.0), (5, 0.5), (10, 1.0)])], label="", last_step=10
    )
    (x0, y0), (x1, y1), (x2, y2) = places(path_of(svg))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert (x0, x2) == (page_chart.LEFT, page_chart.WIDTH - page_chart.RIGHT)
    assert y2 < y1 < y0


def test_decades_are_equally_far_apart_on_a_logarithmic_axis():
    svg = page_chart.chart(
        [Series("a", 1, [(0, 0.01), (1, 0.1), (2, 1.0), (3, 10.0)])], label="", last_step=3
    )
    ys = [y for _, y in places(path_of(svg))]
    gaps = [a - b for a, b in itertools.pairwise(ys)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2)


def test_what_is_not_finite_interrupts_the_curve():
    points = [(0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf), (4, 1.5)]
    path = path_of(page_chart.chart([Series("a", 1, points)], label="", last_step=4))
    assert path.get("d").count("M") == 3
    assert "L" not in path.get("d")


def test_nothing_finite_is_told():
    assert "No finite value" in page_chart.chart(
        [Series("a", 1, [(0, math.nan)])], label="", last_step=0
    )


@pytest.mark.parametrize(
    "points", [[(0, 0.0)], [(7, -3.0), (8, -3.0)], [(0, 1e-30), (1, 1e30)], [(0, 0.0), (1, 1e-12)]]
)
def test_odd_ranges_can_be_drawn(points):
    svg = page_chart.chart([Series("a<b", 1, points)], label='x"y', last_step=points[-1][0])
    height = float(parsed(svg).get("viewBox").split()[3])
    for _, y in places(path_of(svg)):
        assert 0 <= y <= height


def test_long_curves_are_thinned_and_keep_their_extremes():
    points = [(i, math.sin(i / 50)) for i in range(10_000)]
    points[1234] = (1234, 99.0)
    kept = page_chart.thinned(points)
    assert len(kept) <= page_chart.MOST_POINTS + 2
    assert (1234, 99.0) in kept
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]


def test_sparkline_shows_the_target():
    assert 'class="goal"' in page_chart.sparkline([(0, 1.0), (1, 2.0)], 1.5)
    assert 'class="goal"' not in page_chart.sparkline([(0, 1.0), (1, 2.0)], None)
    assert page_chart.sparkline([(0, math.nan)], 1.0) == ""
