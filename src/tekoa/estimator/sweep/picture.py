"""The results of a sweep as a table, and as pictures of the metric against a swept number."""

import html
import math
from collections.abc import Callable, Sequence

from tekoa.estimator.report import charts
from tekoa.estimator.sweep.lanes import Outcome

_COLUMNS, _ROWS = 56, 12
_WIDTH, _HEIGHT, _MARGIN = 520, 260, 56
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#555}.g{stroke:#ddd}.l{fill:none;stroke:#3b6fb6;"
    "stroke-width:1.5;opacity:.5}.d{fill:#3b6fb6}.b{fill:#d1495b}"
)

Point = tuple[float, float]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns one line per lane, in the order of the outcomes.

    Args:
        outcomes: The results, best first.
    """
    names = list(outcomes[0].lane.values)
    header = [*(name.rpartition(".")[2] for name in names), "seed", "steps", outcomes[0].metric, ""]
    rows = [header]
    for outcome in outcomes:
        value = "-" if outcome.value is None else f"{outcome.value:.6g}"
        numbers = [outcome.lane.values[name] for name in names]
        rows.append([*numbers, str(outcome.lane.seed), str(outcome.step), value, outcome.stopped])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return [
        "  ".join(
            word.ljust(width) if i == len(widths) - 1 else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def points_of(outcomes: Sequence[Outcome], name: str) -> list[Point]:
    """Returns swept number and metric of the lanes that have both, in the order of the outcomes."""
    points = []
    for outcome in outcomes:
        try:
            x = float(outcome.lane.values[name])
        except ValueError:
            return []  # Words, not numbers.
        if outcome.value is not None and math.isfinite(outcome.value):
            points.append((x, outcome.value))
    return points if len({x for x, _ in points}) > 1 else []


def is_log(values: Sequence[float]) -> bool:
    """Whether values are shown on a logarithmic axis.

    >>> is_log([1e-3, 1.0]), is_log([0.0, 1.0]), is_log([1.0, 3.0])
    (True, False, False)
    """
    return min(values) > 0 and max(values) / min(values) >= 20


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    convert = math.log if is_log(values) else float
    low, high = convert(min(values)), convert(max(values))
    span = (high - low) or 1.0
    return lambda value: start + (convert(value) - low) / span * (end - start)


def drawing(points: Sequence[Point], x_name: str, y_name: str) -> list[str]:
    r"""Draws points with characters; the first, which is the best, is an O.

    >>> lines = drawing([(0.1, 1.0), (0.001, 3.0)], 'rate', 'loss')
    >>> lines[1].strip(), lines[-3].strip()[:3]
    ('3 | *', '1 |')
    """
    xs, ys = [x for x, _ in points], [y for _, y in points]
    to_column, to_row = _scale(xs, 0, _COLUMNS - 1), _scale(ys, _ROWS - 1, 0)
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for i, (x, y) in reversed(list(enumerate(points))):
        grid[round(to_row(y))][round(to_column(x))] = "*" if i else "O"
    labels = [""] * _ROWS
    labels[0], labels[-1] = charts.number(max(ys)), charts.number(min(ys))
    width = max(map(len, labels))
    lines = [f"{y_name}{' (log)' if is_log(ys) else ''}"]
    lines += [
        f"{label:>{width}} | {''.join(row)}".rstrip()
        for label, row in zip(labels, grid, strict=True)
    ]
    lines.append(f"{'':>{width}} +{'-' * (_COLUMNS + 1)}")
    left, right = charts.number(min(xs)), charts.number(max(xs))
    middle = f"{x_name}{' (log)' if is_log(xs) else ''}".center(_COLUMNS - len(left) - len(right))
    return [*lines, f"{'':>{width}}   {left}{middle}{right}"]


def svg(panels: Sequence[tuple[str, Sequence[Point]]], y_name: str) -> str:
    """Draws the metric against each swept number, side by side, as one SVG file.

    Args:
        panels: Name of a swept number, and its points; the first point is the best.
        y_name: The metric.
    """
    width = _WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(y_name)} of a sweep"><style>{_STYLE}</style>'
        f'<rect width="{width}" height="{_HEIGHT}" fill="#fff"/>'
    ]
    for i, (name, points) in enumerate(panels):
        parts.append(f'<g transform="translate({i * _WIDTH},0)">{_panel(name, points, y_name)}</g>')
    return "".join([*parts, "</svg>"])


def _panel(name: str, points: Sequence[Point], y_name: str) -> str:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    to_x = _scale(xs, _MARGIN, _WIDTH - 20)
    to_y = _scale(ys, _HEIGHT - 40, 24)
    logs = ["" if not is_log(v) else ", logarithmic" for v in (xs, ys)]
    parts = [
        f'<text x="{_MARGIN}" y="14">{html.escape(y_name)}{logs[1]}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{html.escape(name)}{logs[0]}</text>",
    ]
    for y in _ticks(ys):
        parts.append(
            f'<path class="g" d="M{_MARGIN} {to_y(y):.1f}H{_WIDTH - 20}"/><text '
            f'x="{_MARGIN - 6}" y="{to_y(y) + 4:.1f}" text-anchor="end">{charts.number(y)}</text>'
        )
    for x in _ticks(xs):
        parts.append(
            f'<text x="{to_x(x):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">'
            f"{charts.number(x)}</text>"
        )
    best: dict[float, float] = {}
    for x, y in points:
        best.setdefault(x, y)  # The best comes first.
    line = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in sorted(best.items()))
    parts.append(f'<path class="l" d="M{line}"/>')
    for k, (x, y) in enumerate(points):
        kind, radius = ("d", 3) if k else ("b", 5)
        parts.append(f'<circle class="{kind}" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="{radius}"/>')
    return "".join(parts)


def _ticks(values: Sequence[float]) -> list[float]:
    make = charts.log_ticks if is_log(values) else charts.ticks
    inside = [tick for tick in make(min(values), max(values)) if min(values) <= tick <= max(values)]
    return inside if len(inside) > 1 else [min(values), max(values)]
