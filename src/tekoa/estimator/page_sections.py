"""The parts of the page, each made of the facts of a run."""

import dataclasses
import html
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tekoa.estimator import page_chart
from tekoa.estimator.config import RunConfig
from tekoa.estimator.page_chart import Series, number
from tekoa.estimator.page_events import Point
from tekoa.estimator.page_facts import RunFacts

TRAIN = "train"
_OF_TRAINING = (TRAIN, "valid")
SPEED = "seconds_per_step"
_FIRST = ("loss", "cost", "perplexity")
_LAST = ("gradients_l2norm", "weights_l2norm")
_N_COLORS = 6


def metric_charts(facts: RunFacts) -> dict[str, dict[str, list[Point]]]:
    """Curves that belong together: metric -> who measured it -> points.

    Validation while training is written as `train/valid_METRIC`.
    """
    charts: dict[str, dict[str, list[Point]]] = {}
    for place, curves in facts.curves.items():
        for tag, points in curves.items():
            group, _, name = tag.partition("/")
            if group == "params" or name == SPEED:
                continue
            who = place or group
            if place == TRAIN and group != TRAIN:  # Such as rates/GROUP.
                who, name = name, group
            elif place == TRAIN and name.startswith("valid_"):
                who, name = "valid", name.removeprefix("valid_")
            charts.setdefault(name, {})[who] = points

    def rank(name: str) -> tuple[int, int, str]:
        first = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        return name in _LAST, first, name

    def first(who: str) -> int:
        return _OF_TRAINING.index(who) if who in _OF_TRAINING else len(_OF_TRAINING)

    return {
        name: {who: charts[name][who] for who in sorted(charts[name], key=first)}
        for name in sorted(charts, key=rank)
    }


def curves(facts: RunFacts) -> str:
    """A chart for each metric, its curves beside one another."""
    charts = metric_charts(facts)
    if not charts:
        return '<p class="empty">No point is written yet.</p>'
    others = sorted({who for chart in charts.values() for who in chart})
    places = list(dict.fromkeys([*_OF_TRAINING, *others]))
    best = {(b.metric, b.place.rpartition("/")[0]): b.step for b in facts.best}
    cards = []
    for name, by_place in charts.items():
        series = [
            Series(who, places.index(who) % _N_COLORS + 1, [(p.step, p.value) for p in points])
            for who, points in by_place.items()
        ]
        marks = [
            xy
            for s in series
            for xy in s.points
            if math.isfinite(xy[1]) and best.get((name, s.name)) == xy[0]
        ]
        picture = page_chart.chart(
            series, label=f"{name} by step", last_step=facts.step, marks=marks
        )
        cards.append(f'<div class="card">{_legend(series)}<h3>{_text(name)}</h3>{picture}</div>')
    return f'<div class="charts">{"".join(cards)}</div>'


def _legend(series: Sequence[Series]) -> str:
    items = (
        f'<i class="c{s.color}"></i>{_text(s.name)} <b>{number(s.points[-1][1])}</b>'
        for s in series
    )
    return f'<span class="legend">{"".join(items)}</span>'


def parameters(facts: RunFacts) -> str:
    """How large the entries of each parameter are, against the scale Amos aims at."""
    scales = facts.record.get("scales") or {}
    rows = []
    for tag, points in sorted(facts.curves.get(TRAIN, {}).items()):
        if not tag.startswith("params/"):
            continue
        name, _, shape = tag.removeprefix("params/").partition(" ")
        eta, last = scales.get(name), points[-1].value
        picture = page_chart.sparkline([(p.step, p.value) for p in points], eta)
        cells = [
            f'<td class="w"><code>{_text(name)}</code></td><td class="faint">{_text(shape)}</td>',
            f'<td>{picture}</td><td class="n">{number(last)}</td>',
        ]
        if scales:
            cells.append(
                f'<td class="n">{"" if eta is None else number(eta)}</td>{_gauge(last, eta)}'
            )
        rows.append("".join(cells))
    if not rows:
        return '<p class="empty">No scale of a parameter is written yet.</p>'
    heads = ["parameter", "shape", "over the run", "#RMS"]
    return _table([*heads, "#eta", "RMS / eta", "#"] if scales else heads, rows)


def _gauge(value: float, eta: float | None) -> str:
    """A bar from the middle, where value and scale are equal, to ten times less or more."""
    if not eta or not value > 0 or not math.isfinite(value):
        return "<td></td><td></td>"
    end = 60 + 58 * max(-1.0, min(1.0, math.log10(value / eta)))
    left, width = min(60.0, end), abs(end - 60)
    return (
        f'<td><svg class="gauge" viewBox="0 0 120 12" aria-hidden="true">'
        f'<rect x="{left:.1f}" y="3" width="{width:.1f}" height="6" rx="1.5"/>'
        f'<path d="M60 0V12"/></svg></td><td class="n">{number(value / eta)}</td>'
    )


def checkpoints(facts: RunFacts) -> str:
    """Every stored step: where it is kept, whether it is whole, and what it scores."""
    by_step: dict[int, list[tuple[str, Any]]] = {}
    for place, infos in facts.kept.items():
        for info in infos:
            by_step.setdefault(info.step, []).append((place, info))
    if not by_step:
        return '<p class="empty">No checkpoint is stored yet.</p>'
    scored = _scored(facts)
    best = {(b.place, b.step) for b in facts.best}
    rows = []
    for step, found in sorted(by_step.items(), reverse=True):
        tags = "".join(_place_tag(place, (place, step) in best) for place, _ in found)
        problems = [f"{info.path.name}: {info.problem}" for _, info in found if info.problem]
        state = '<span class="ok">✓ verified</span>'
        if problems:
            state = f'<span class="no">✗ {_text("; ".join(problems))}</span>'
        elif not all(info.layout == "tekoa" for _, info in found):
            state = '<span class="faint">no checksums (T5X)</span>'
        size = max(info.n_bytes for _, info in found) / 1e6
        scores = "".join(f'<td class="n">{values.get(step, "")}</td>' for values in scored.values())
        rows.append(
            f'<td class="n">{step:,}</td><td>{tags}</td>{scores}'
            f'<td class="n">{size:,.2f} MB</td><td class="w">{state}</td>'
        )
    heads = ["#step", "kept in", *(f"#{name}" for name in scored), "#size", "checksums"]
    return _table(heads, rows)


def _place_tag(place: str, is_best: bool) -> str:
    text = f"★ {place}" if is_best else place or "checkpoints"
    return f'<span class="tag{" gold" if is_best else ""}">{_text(text)}</span>'


def _scored(facts: RunFacts) -> dict[str, dict[int, str]]:
    """The values at each step, of evaluators' metrics and of losses; few enough for a table."""
    columns = {}
    for name, by_place in metric_charts(facts).items():
        for who, points in by_place.items():
            if who != TRAIN or name in _FIRST:
                columns[f"{who} {name}"] = {p.step: number(p.value) for p in points}
    return dict(list(columns.items())[:5])


def timings(facts: RunFacts) -> str:
    """Speed over the run, and where the time went."""
    points = facts.curves.get(TRAIN, {}).get(f"{TRAIN}/{SPEED}", [])
    if not points:
        return '<p class="empty">No time is written yet.</p>'
    series = Series("ms per step", 1, [(p.step, 1e3 * p.value) for p in points])
    rows = [f"<td>{name}</td><td class='n'>{value}</td>" for name, value in _times(facts, points)]
    return (
        '<div class="two"><div class="card"><h3>milliseconds per step</h3>'
        f"{page_chart.chart([series], label=series.name, last_step=facts.step)}</div>"
        f"{_table(['', '#'], rows)}</div>"
    )


def _times(facts: RunFacts, points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    inside, outside = seconds(facts)
    yield "in training steps", duration(inside)
    yield "between them: validation, logs, saves", duration(outside)
    yield (
        "fastest, median, slowest step",
        " · ".join(
            f"{1e3 * f([p.value for p in points]):.3g} ms" for f in (min, statistics.median, max)
        ),
    )
    yield "starts of the trainer", str(len({p.start for p in points}))
    yield "first point", clock(points[0].wall_time)
    yield "last point", clock(points[-1].wall_time)


def seconds(facts: RunFacts) -> tuple[float, float]:
    """Time within the training steps, and between them within one start of the trainer."""
    points = facts.curves.get(TRAIN, {}).get(f"{TRAIN}/{SPEED}", [])
    inside = outside = 0.0
    last = None
    for point in points:
        n_steps = point.step - (last.step if last else 0)
        inside += point.value * n_steps
        if last is not None and last.start == point.start:
            outside += max(0.0, point.wall_time - last.wall_time - point.value * n_steps)
        last = point
    return inside, outside


def settings(facts: RunFacts) -> str:
    """The model's settings, the flags that are not as usual, the command, the versions."""
    record = facts.record
    if not record:
        return '<p class="empty">There is no run.json.</p>'
    usual = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    given = {
        name: value
        for name, value in record.get("flags", {}).items()
        if name != "overrides" and value not in (usual.get(name), None, [])
    }
    versions = ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())
    about = {"model": record.get("model"), "seed": record.get("random_seed"), "versions": versions}
    command = " ".join(["tekoa", *map(str, record.get("command", [])[1:])])
    return (
        f'<div class="two">{_pairs({**about, **_flat(record.get("settings") or {})})}'
        f"{_pairs(given)}</div>"
        f'<div class="card text" style="margin-top:14px"><pre>{_text(command)}</pre></div>'
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _pairs(values: dict[str, Any]) -> str:
    rows = [
        f'<td><code>{_text(k)}</code></td><td class="n w">{_text(v)}</td>'
        for k, v in values.items()
    ]
    return _table(["", "#"], rows)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table; a head that starts with # stands over numbers."""
    cells = "".join(
        f'<th class="n">{_text(head[1:])}</th>'
        if head.startswith("#")
        else f"<th>{_text(head)}</th>"
        for head in heads
    )
    top = f"<tr>{cells}</tr>" if any(head.strip("#") for head in heads) else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="card wide scroll"><table>{top}{body}</table></div>'


def duration(value: float) -> str:
    """Seconds in words.

    >>> duration(4.25), duration(130), duration(7260)
    ('4.2 s', '2 min 10 s', '2 h 1 min')
    """
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """A time of day, with its date, where the page is made."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _text(value: Any) -> str:
    return html.escape(str(value))
