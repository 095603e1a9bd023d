"""Charts as inline SVG; their colours come from the page, for light and dark themes."""

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 500, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 26
# Longer curves are reduced to the extremes of intervals.
MAX_POINTS = 600
# Colours of the palette in page.css.
N_COLORS = 6

XY = tuple[float, float]


class Series(NamedTuple):
    """One curve: name, index into the page's palette (from 1), points in order of x."""

    name: str
    color: int
    points: Sequence[XY]


def paint(color: int, css_class: str = "") -> str:
    """Returns the HTML attributes of something in a colour.

    Args:
        color: Index from 1. Beyond the palette of the page, hues that differ from their neighbours.
        css_class: More classes.

    >>> paint(2, 'line'), paint(7)
    ('class="line c2"', 'class="hue" style="--hue:243"')
    """
    if color <= N_COLORS:
        return f'class="{f"{css_class} c{color}".strip()}"'
    hue = round(137.508 * color) % 360  # The golden angle.
    return f'class="{f"{css_class} hue".strip()}" style="--hue:{hue}"'


def chart(
    series: Sequence[Series],
    *,
    label: str,
    last_step: int,
    marks: Sequence[XY] = (),
    max_points: int = MAX_POINTS,
) -> str:
    """Draws curves over steps, with a logarithmic axis if the values span a wide range.

    Args:
        series: The curves; NaN and Inf interrupt them.
        label: Description of the chart for screen readers.
        last_step: End of the step axis, the same for all charts of a page.
        marks: Points to mark, such as the best checkpoint.
        max_points: Points per curve; longer ones are reduced.
    """
    drawn = [s._replace(points=thin_out(s.points, max_points)) for s in series]
    values = [y for s in drawn for _, y in s.points if math.isfinite(y)]
    if not values:
        return '<p class="empty">No finite values yet.</p>'
    is_log = min(values) > 0 and max(values) / min(values) > 50
    to_x = _axis(0, max(1, last_step), LEFT, WIDTH - RIGHT)
    y_ticks = log_ticks(min(values), max(values)) if is_log else ticks(min(values), max(values))
    low, high = min([*values, *y_ticks]), max([*values, *y_ticks])
    to_y = _axis(low, high, HEIGHT - BOTTOM, TOP, is_log=is_log)
    elements = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{html.escape(label)}">'
    ]
    elements += [
        f'<path class="grid" d="M{LEFT} {to_y(tick):.1f}H{WIDTH - RIGHT}"/><text x="{LEFT - 8}" '
        f'y="{to_y(tick) + 3.5:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in y_ticks
    ]
    elements += [
        f'<text x="{to_x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{compact(tick)}</text>'
        for tick in ticks(0, max(1, last_step), integers=True)
    ]
    elements += [_curve(s, to_x, to_y) for s in drawn]
    elements += [
        f'<circle class="best" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="4.5"/>' for x, y in marks
    ]
    return "".join([*elements, '<line class="cursor"/></svg>'])


def sparkline(points: Sequence[XY], target: float | None) -> str:
    """Draws one small curve, with a dashed line at its target value if there is one."""
    width, height = 150, 34
    points = [(x, y) for x, y in thin_out(points) if math.isfinite(y)]
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


def thin_out(points: Sequence[XY], limit: int = MAX_POINTS) -> list[XY]:
    """Keeps the lowest and the highest point of each interval, and both ends.

    >>> thin_out([(x, x % 10) for x in range(100)], limit=4)
    [(0, 0), (9, 9), (50, 0), (59, 9), (99, 9)]
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), size):
        interval = range(start, min(start + size, len(points)))
        finite = [i for i in interval if math.isfinite(points[i][1])] or list(interval)
        chosen |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(chosen)]


def ticks(low: float, high: float, *, integers: bool = False) -> list[float]:
    """Returns about five round numbers that enclose the range, or integers within it.

    >>> ticks(0.0, 0.93), ticks(0, 16875, integers=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0, 5000, 10000, 15000])
    """
    span = high - low or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 4))
    size *= next(factor for factor in (1, 2, 5, 10) if factor * size >= span / 6)
    if integers:
        size = max(1, round(size))
        return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    first, last = math.floor(low / size), math.ceil(high / size)
    return [float(f"{i * size:.10g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten that enclose the range, about six at most.

    >>> log_ticks(0.002, 3.0)
    [0.001, 0.01, 0.1, 1.0, 10.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    return [float(f"1e{i}") for i in range(first, last + every, every)]


def number(value: float) -> str:
    """Formats a number with four significant digits.

    >>> number(0.12345), number(12345.6), number(1e-7), number(3.0)
    ('0.1235', '12,346', '1e-07', '3')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def compact(value: float) -> str:
    """Formats a step number in a few characters.

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
    """Returns a function that maps values to coordinates."""
    convert = math.log10 if is_log else float
    first, last = convert(low), convert(high)
    if first == last:
        return lambda value: (start + end) / 2
    return lambda value: start + (convert(value) - first) / (last - first) * (end - start)


def _curve(series: Series, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    """Draws a curve, with the step and the value of each of its points for the pointer."""
    path, dot, shown, command = "", "", [], "M"
    for step, value in series.points:
        if math.isfinite(value):
            x, y = to_x(step), to_y(value)
            path += f"{command}{x:.1f} {y:.1f}"
            dot = f'<circle {paint(series.color, "dot")} cx="{x}" cy="{y}" r="3"/>'
            shown.append(f"{step} {number(value)}")
        command = "L" if math.isfinite(value) else "M"
    line = (
        f'<path {paint(series.color, "line")} d="{path}" data-name="{html.escape(series.name)}" '
        f'data-values="{";".join(shown)}"/>'
    )
    return line + dot if len(shown) == 1 else line
