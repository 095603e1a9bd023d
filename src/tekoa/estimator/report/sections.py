"""The sections of the page, each built from the facts of a run."""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tekoa.estimator.cli.flags import RunConfig
from tekoa.estimator.report import charts as charts_lib
from tekoa.estimator.report.charts import Series, number
from tekoa.estimator.report.document import escape
from tekoa.estimator.report.events import Point
from tekoa.estimator.report.facts import TRAIN, RunFacts
from tekoa.extensions import run_record
from tekoa.store.commit import paths
from tekoa.store.read.inspect import StepInfo

_OF_TRAINING = (TRAIN, "valid")
SPEED = "seconds_per_step"
_MAX_TEXTS = 20
_FIRST = ("loss", "cost", "perplexity")
LAST = ("last_loss", "gradients_l2norm", "weights_l2norm")
# What the group "system" says about the whole run: sums of seconds, recent speeds, most memory.
_SPENT = {
    "data_seconds": "reading batches, a part of the steps",
    "compile_seconds": "compiling",
    "validation_seconds": "validation",
    "samples_seconds": "text samples",
    "save_seconds": "waiting for saves",
}
_SPEEDS = {
    "examples_per_second": "examples per second, recent median",
    "tokens_per_second": "tokens per second, recent median",
    "flops_utilisation": "share of the devices' peak, recent median",
}
_MEMORY = {"host_bytes": "memory of the process", "device_peak_bytes": "memory of a device, peak"}


def metric_charts(facts: RunFacts) -> dict[str, dict[str, list[Point]]]:
    """Groups the points of all curves by metric, then by source.

    Validation during training is logged as `train/valid_METRIC` by the command, and by `fit` as
    `eval/METRIC` or `eval/NAME/METRIC`.
    """
    charts: dict[str, dict[str, list[Point]]] = {}
    for place, curves in facts.curves.items():
        for tag, points in curves.items():
            group, _, name = tag.partition("/")
            if group in ("params", "system") or name == SPEED:
                continue
            source = place or group
            if is_of_parameters(group):
                source, name = name, group
            elif place == TRAIN and group != TRAIN:
                source, _, name = tag.rpartition("/")
            elif place == TRAIN and name.startswith("valid_"):
                source, name = "valid", name.removeprefix("valid_")
            charts.setdefault(name, {})[source] = points

    def source_rank(source: str) -> int:
        return _OF_TRAINING.index(source) if source in _OF_TRAINING else len(_OF_TRAINING)

    return {
        name: {source: charts[name][source] for source in sorted(charts[name], key=source_rank)}
        for name in sorted(charts, key=metric_rank)
    }


def is_of_parameters(group: str) -> bool:
    """Whether a group has one curve for each parameter or group of them, not for each metric."""
    return group == "rates" or group.endswith("_norms")


def metric_rank(name: str) -> tuple[int, int, str]:
    """Returns the place of a metric among others: losses first, norms last."""
    first = _FIRST.index(name) if name in _FIRST else len(_FIRST)
    return name in LAST, first, name


def curves(facts: RunFacts) -> str:
    """Returns one chart per metric, with the curves of all its sources."""
    charts = metric_charts(facts)
    if not charts:
        return '<p class="empty">No points yet.</p>'
    others = sorted({source for chart in charts.values() for source in chart})
    sources = list(dict.fromkeys([*_OF_TRAINING, *others]))
    best = {(b.metric, b.place.rpartition("/")[0]): b.step for b in facts.best}
    cards = []
    for name, by_source in charts.items():
        series = [
            Series(source, sources.index(source) + 1, xy(points))
            for source, points in by_source.items()
        ]
        marks = [
            point
            for s in series
            for point in s.points
            if math.isfinite(point[1]) and best.get((name, s.name)) == point[0]
        ]
        svg = charts_lib.chart(series, label=f"{name} by step", last_step=facts.step, marks=marks)
        cards.append(f'<div class="card">{_legend(series)}<h3>{escape(name)}</h3>{svg}</div>')
    return f'<div class="charts">{"".join(cards)}</div>'


def xy(points: Sequence[Point]) -> list[charts_lib.XY]:
    """Returns points as pairs of step and value."""
    return [(point.step, point.value) for point in points]


def _legend(series: Sequence[Series]) -> str:
    items = (
        f'<button type="button" aria-pressed="true" data-name="{escape(s.name)}">'
        f"<i {charts_lib.paint(s.color)}></i>{escape(s.name)} <b>{number(s.points[-1][1])}</b>"
        "</button>"
        for s in series
    )
    return f'<span class="legend">{"".join(items)}</span>'


def texts(facts: RunFacts) -> str:
    """Returns the last texts of the run, such as samples of a language model, newest first."""
    rows = [
        f'<td class="n">{step:,}</td><td class="faint">{escape(name)}</td>'
        f"<td><pre>{escape(value)}</pre></td>"
        for step, by_name in sorted(facts.texts.items(), reverse=True)[:_MAX_TEXTS]
        for name, value in by_name.items()
    ]
    return _table(["#step", "name", "text"], rows)


def parameters(facts: RunFacts) -> str:
    """Returns the section with each parameter's RMS, compared with its scale; empty if unknown."""
    scales = facts.record.get("scales") or {}
    rows = []
    for tag, points in sorted(facts.curves.get(TRAIN, {}).items()):
        if not tag.startswith("params/"):
            continue
        name, _, shape = tag.removeprefix("params/").partition(" ")
        eta, last = scales.get(name), points[-1].value
        svg = charts_lib.sparkline(xy(points), eta)
        cells = [
            f'<td class="w"><code>{escape(name)}</code></td><td class="faint">{escape(shape)}</td>',
            f'<td>{svg}</td><td class="n">{number(last)}</td>',
        ]
        if scales:
            text = "" if eta is None else number(eta)
            cells.append(f'<td class="n">{text}</td>{_gauge(last, eta)}')
        rows.append("".join(cells))
    if not rows:
        return ""
    title = "<h2>Parameter scales</h2><p>Root mean square of the entries."
    heads = ["parameter", "shape", "over the run", "#RMS"]
    if scales:
        title += (
            " The dashed line is eta, the scale found from the model. The bar shows RMS / eta, "
            "from a tenth to ten times."
        )
        heads += ["#eta", "RMS / eta", "#"]
    return f"{title}</p>{_table(heads, rows)}"


def _gauge(value: float, eta: float | None) -> str:
    """Draws value / eta as a bar from the middle (1), on a scale from 0.1 to 10."""
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
    """Returns a table of all checkpoints: directories, scores, size and state."""
    by_step: dict[int, list[tuple[str, StepInfo]]] = {}
    for place, infos in facts.checkpoints.items():
        for info in infos:
            by_step.setdefault(info.step, []).append((place, info))
    if not by_step:
        return '<p class="empty">No checkpoints yet.</p>'
    scores = _score_columns(facts)
    best = {(b.place, b.step) for b in facts.best}
    rows = []
    for step, copies in sorted(by_step.items(), reverse=True):
        tags = "".join(_place_tag(place, (place, step) in best) for place, _ in copies)
        size = max(info.n_bytes for _, info in copies) / 1e6
        cells = "".join(f'<td class="n">{values.get(step, "")}</td>' for values in scores.values())
        rows.append(
            f'<td class="n">{step:,}</td><td>{tags}</td>{cells}<td class="n">{size:,.2f} MB</td>'
            f'<td class="w">{_state([info for _, info in copies])}</td>'
        )
    heads = ["#step", "directory", *(f"#{name}" for name in scores), "#size", "files"]
    return _table(heads, rows)


def _state(copies: Sequence[StepInfo]) -> str:
    problems = [f"{info.path.name}: {info.problem}" for info in copies if info.problem]
    if problems:
        return f'<span class="no">✗ {escape("; ".join(problems))}</span>'
    if not all((info.path / paths.MANIFEST).exists() for info in copies):
        return '<span class="faint">written by another program</span>'
    return '<span class="ok">✓ complete</span>'


def _place_tag(place: str, is_best: bool) -> str:
    text = f"★ {place}" if is_best else place or "checkpoints"
    return f'<span class="tag{" gold" if is_best else ""}">{escape(text)}</span>'


def _score_columns(facts: RunFacts) -> dict[str, dict[int, str]]:
    """Returns the first five losses and evaluation metrics, by step."""
    columns = {}
    for name, by_source in metric_charts(facts).items():
        for source, points in by_source.items():
            if not is_of_parameters(name) and (source != TRAIN or name in _FIRST):
                columns[f"{source} {name}"] = {p.step: number(p.value) for p in points}
    return dict(list(columns.items())[:5])


def timings(facts: RunFacts) -> str:
    """Returns the speed over the run, and how the time was spent."""
    points = step_times(facts)
    if not points:
        return '<p class="empty">No times yet.</p>'
    series = Series("ms per step", 1, [(p.step, 1e3 * p.value) for p in points])
    rows = [f"<td>{name}</td><td class='n'>{value}</td>" for name, value in _times(facts, points)]
    return (
        '<div class="two"><div class="card"><h3>milliseconds per step</h3>'
        f"{charts_lib.chart([series], label=series.name, last_step=facts.step)}</div>"
        f"{_table(['', '#'], rows)}</div>"
    )


def _times(facts: RunFacts, points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    inside, outside = seconds(facts)
    yield "in training steps", duration(inside)
    yield "between steps: validation, logging, saving", duration(outside)
    yield from _system(facts)
    times = [1e3 * point.value for point in points]
    shown = [f"{f(times):.3g} ms" for f in (min, statistics.median, max)]
    yield "fastest · median · slowest step", " · ".join(shown)
    yield "starts of the training process", str(len({p.start for p in points}))
    yield "first point", clock(points[0].wall_time)
    yield "last point", clock(points[-1].wall_time)


def _system(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yields what the run measured of itself, as far as it did."""
    system = {
        tag.removeprefix("system/"): [point.value for point in points]
        for tag, points in facts.curves.get(TRAIN, {}).items()
        if tag.startswith("system/") and points
    }
    for name in filter(system.__contains__, _SPENT):
        yield _SPENT[name], duration(sum(system[name]))
    for name in filter(system.__contains__, _SPEEDS):
        yield _SPEEDS[name], number(statistics.median(system[name][-20:]))
    for name in filter(system.__contains__, _MEMORY):
        yield _MEMORY[name], f"{max(system[name]) / 1e9:.2f} GB"


def step_times(facts: RunFacts) -> list[Point]:
    """Returns the curve of the seconds per training step."""
    return facts.curves.get(TRAIN, {}).get(f"{TRAIN}/{SPEED}", [])


def steps_per_second(times: Sequence[Point]) -> float | None:
    """Returns the median speed of the last checks."""
    recent = statistics.median(point.value for point in times[-20:])
    return 1 / recent if recent > 0 else None


def state_of(facts: RunFacts) -> tuple[str, str]:
    """Returns the state of a run as a CSS class and a word."""
    if facts.end_step is not None:
        return "done", "finished"
    return ("on", "running") if facts.is_running else ("off", "incomplete")


def seconds(facts: RunFacts) -> tuple[float, float]:
    """Returns the seconds within steps, and between steps of the same process."""
    inside = outside = 0.0
    previous = None
    for point in step_times(facts):
        n_steps = point.step - (previous.step if previous else 0)
        inside += point.value * n_steps
        if previous is not None and previous.start == point.start:
            outside += max(0.0, point.wall_time - previous.wall_time - point.value * n_steps)
        previous = point
    return inside, outside


def settings(facts: RunFacts) -> str:
    """Returns the settings of the model, the changed flags, the command and the versions."""
    record = facts.record
    if not record:
        return '<p class="empty">No run.json.</p>'
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    changed_flags = {
        name: value
        for name, value in record.get("flags", {}).items()
        if name != "overrides" and value not in (defaults.get(name), None, [])
    }
    versions = ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())
    model, seed = record.get("model"), record.get("random_seed")
    about = {} if model is None else {"model": model, "seed": seed}  # A script has neither.
    script, *arguments = map(str, record.get("command") or [""])
    command = " ".join([script if model is None else "tekoa", *arguments])
    values = {**about, **run_record.flatten(record.get("settings") or {}), "versions": versions}
    values = {name: value for name, value in values.items() if value is not None}
    return (
        f'<div class="two">{_pairs(values)}{_pairs(changed_flags) if changed_flags else ""}</div>'
        f'<div class="card text" style="margin-top:14px"><pre>{escape(command)}</pre></div>'
    )


def _pairs(values: dict[str, Any]) -> str:
    rows = [
        f'<td><code>{escape(k)}</code></td><td class="n w">{escape(v)}</td>'
        for k, v in values.items()
    ]
    return _table(["", "#"], rows)


def sortable_table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Returns a table whose headings are buttons that sort it; rows include their `<tr>`."""
    cells = (
        f'<th scope="col"{" class=n" if head.startswith("#") else ""}>'
        f'<button type="button" data-column="{i}">{escape(head.removeprefix("#"))}</button></th>'
        for i, head in enumerate(heads)
    )
    return (
        f'<div class="card wide scroll"><table class="runs"><thead><tr>{"".join(cells)}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Returns a table; a heading that starts with # is that of a column of numbers."""
    starts = ('<th class="n">' if head.startswith("#") else "<th>" for head in heads)
    cells = "".join(f"{s}{escape(h.removeprefix('#'))}</th>" for s, h in zip(starts, heads))
    top = f"<tr>{cells}</tr>" if any(head.strip("#") for head in heads) else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="card wide scroll"><table>{top}{body}</table></div>'


def duration(value: float) -> str:
    """Formats a duration in seconds.

    >>> duration(4.25), duration(130), duration(7260)
    ('4.2 s', '2 min 10 s', '2 h 1 min')
    """
    if not math.isfinite(value):
        return "unknown"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """Formats seconds since 1970 as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "unknown"
