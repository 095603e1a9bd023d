"""Curves as inline SVG: colours come from the page, so that dark and light both read well."""

import html
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 500, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 26
# More points than this are drawn by the extremes of each stretch.
MOST_POINTS = 600

XY = tuple[float, float]


class Series(NamedTuple):
    """One curve: its name, its place in the page's palette (from 1), its points by rising x."""

    name: str
    color: int
    points: Sequence[XY]


def chart(series: Sequence[Series], *, label: str, last_step: int, marks: Sequence[XY] = ()) -> str:
    """Draws curves over steps, on a logarithmic axis where values span it.

    Args:
        series: The curves; points that are not finite interrupt them.
        label: What is shown, for those who cannot see it.
        last_step: Where the axis of steps ends; the charts of a page share it.
        marks: Points to mark, such as that of the best checkpoint.
    """
    drawn = [s._replace(points=thinned(s.points)) for s in series]
    values = [y for s in drawn for _, y in s.points if math.isfinite(y)]
    if not values:
        return '<p class="empty">No finite value yet.</p>'
    is_log = min(values) > 0 and max(values) / min(values) > 50
    to_x = _axis(0, max(1, last_step), LEFT, WIDTH - RIGHT)
    y_ticks = log_ticks(min(values), max(values)) if is_log else ticks(min(values), max(values))
    low, high = min([*values, *y_ticks]), max([*values, *y_ticks])
    to_y = _axis(low, high, HEIGHT - BOTTOM, TOP, is_log=is_log)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}">'
    ]
    parts += [_grid_line(to_y(tick), number(tick)) for tick in y_ticks]
    parts += [
        f'<text x="{to_x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{compact(tick)}</text>'
        for tick in ticks(0, max(1, last_step), whole=True)
    ]
    parts += [_curve(s, to_x, to_y) for s in drawn]
    parts += [
        f'<circle class="best" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="4.5"/>' for x, y in marks
    ]
    return "".join([*parts, '<line class="cursor"/></svg>'])


def sparkline(points: Sequence[XY], target: float | None) -> str:
    """Draws one small curve, with a dashed line at the value it is expected to come to."""
    width, height = 150, 34
    points = [(x, y) for x, y in thinned(points) if math.isfinite(y)]
    if not points:
        return ""
    values = [y for _, y in points] + ([] if target is None else [target])
    to_x = _axis(points[0][0], points[-1][0], 2, width - 4)
    to_y = _axis(min(values), max(values), height - 4, 4)
    line = "".join(
        f"{'L' if i else 'M'}{to_x(x):.1f} {to_y(y):.1f}" for i, (x, y) in enumerate(points)
    )
    goal = "" if target is None else f'<path class="goal" d="M0 {to_y(target):.1f}H{width}"/>'
    x, y = points[-1]
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true">{goal}'
        f'<path class="line c1" d="{line}"/>'
        f'<circle class="dot c1" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="2.4"/></svg>'
    )


def thinned(points: Sequence[XY], most: int = MOST_POINTS) -> list[XY]:
    """Keeps the lowest and the highest point of each stretch, and both ends.

    >>> thinned([(x, x % 10) for x in range(100)], most=4)
    [(0, 0), (9, 9), (50, 0), (59, 9), (99, 9)]
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [i for i in stretch if math.isfinite(points[i][1])] or list(stretch)
        kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers, about five: around both ends, or between them if they are to be whole.

    >>> ticks(0.0, 0.93), ticks(0, 16875, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0, 5000, 10000, 15000])
    """
    span = high - low or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 4))
    size *= next(factor for factor in (1, 2, 5, 10) if factor * size >= span / 6)
    if whole:
        size = max(1, round(size))
        return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    first, last = math.floor(low / size), math.ceil(high / size)
    return [float(f"{i * size:.10g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the values, not more than about six.

    >>> log_ticks(0.002, 3.0)
    [0.001, 0.01, 0.1, 1.0, 10.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    return [float(f"1e{i}") for i in range(first, last + every, every)]


def number(value: float) -> str:
    """Four digits that matter.

    >>> number(0.12345), number(12345.6), number(1e-7), number(3.0)
    ('0.1235', '12,346', '1e-07', '3')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e4 and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def compact(value: float) -> str:
    """A step in few letters.

    >>> compact(500), compact(15000), compact(2.5e6)
    ('500', '15k', '2.5M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _axis(
    low: float, high: float, start: float, end: float, *, is_log: bool = False
) -> Callable[[float], float]:
    """Maps values to places in the picture."""
    convert = math.log10 if is_log else float
    first, last = convert(low), convert(high)
    if first == last:
        return lambda value: (start + end) / 2
    return lambda value: start + (convert(value) - first) / (last - first) * (end - start)


def _grid_line(y: float, text: str) -> str:
    return (
        f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    )


def _curve(series: Series, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    """A path that carries its numbers, for the page to show them under the pointer."""
    places, command = [], "M"
    for x, y in series.points:
        if not math.isfinite(y):
            command = "M"
            continue
        places.append((to_x(x), to_y(y), x, number(y), command))
        command = "L"
    path = "".join(f"{command}{x:.1f} {y:.1f}" for x, y, *_, command in places)
    shown = [[round(x, 1), round(y, 1), step, text] for x, y, step, text, _ in places]
    dot = ""
    if len(places) == 1:
        dot = f'<circle class="dot c{series.color}" cx="{places[0][0]}" cy="{places[0][1]}" r="3"/>'
    return (
        f'<path class="line c{series.color}" d="{path}" data-name="{html.escape(series.name)}" '
        f"data-points='{json.dumps(shown, separators=(',', ':'))}'/>{dot}"
    )
