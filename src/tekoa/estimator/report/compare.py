"""Several runs on one page: a table to sort and filter, and their curves in shared charts."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tekoa.estimator.report import charts as charts_lib
from tekoa.estimator.report import document, sections
from tekoa.estimator.report.charts import Series, number
from tekoa.estimator.report.document import escape
from tekoa.estimator.report.events import Point
from tekoa.estimator.report.facts import TRAIN, RunFacts
from tekoa.extensions import run_record

# Points of all curves together: the page stays below 3 MB.
_MAX_POINTS = 70_000
_N_SCORES, _N_SETTINGS = 5, 8
_LOWER_IS_BETTER = re.compile("loss|cost|perplexity|error|mse|mae|huber|bce|nll")
_IGNORED_FLAGS = {"model_dir", "module_imp", "overrides", "again", "json", "progress", "mode"}


@dataclasses.dataclass(frozen=True)
class NamedRun:
    """A run and its name on the page."""

    name: str
    facts: RunFacts


def named_runs(runs: Sequence[RunFacts]) -> list[NamedRun]:
    """Names runs by their paths below the directory that contains all of them."""
    parents = [facts.directory.parent for facts in runs]
    top = pathlib.Path(os.path.commonpath(parents))
    return [NamedRun(facts.directory.relative_to(top).as_posix(), facts) for facts in runs]


def render(runs: Sequence[RunFacts], *, is_live: bool = False) -> str:
    """Returns the page of several runs as HTML."""
    named = named_runs(runs)
    title = f"{len(named)} runs"
    elements = [
        f"<h1>{title}</h1>",
        '<p class="sub">Click a heading to sort, a run to hide or show its curves.</p>',
        '<div class="filter"><input type="search" placeholder="Filter by name" '
        'aria-label="Filter by name"><button type="button" data-all="true">all</button>'
        '<button type="button" data-all="false">none</button></div>',
        _table(named),
        "<h2>Curves</h2><p>Hover for values, or focus a chart and use the arrow keys.</p>",
        _charts(named),
        document.footer(),
    ]
    return document.document(title, elements, is_live=is_live)


def _charts(runs: Sequence[NamedRun]) -> str:
    by_chart: dict[tuple[str, str], list[tuple[int, str, list[Point]]]] = {}
    for i, run in enumerate(runs):
        for metric, by_source in sections.metric_charts(run.facts).items():
            for source, points in by_source.items():
                by_chart.setdefault((metric, source), []).append((i, run.name, points))
    if not by_chart:
        return '<p class="empty">No points yet.</p>'
    n_curves = sum(map(len, by_chart.values()))
    max_points = max(20, min(charts_lib.MAX_POINTS, _MAX_POINTS // n_curves))
    last_step = max(run.facts.step for run in runs)
    cards = []
    for metric, source in sorted(by_chart, key=lambda key: sections.metric_rank(key[0])):
        series = [
            Series(name, i + 1, sections.xy(points)) for i, name, points in by_chart[metric, source]
        ]
        svg = charts_lib.chart(
            series, label=f"{metric} by step", last_step=last_step, max_points=max_points
        )
        head = f"<h3>{escape(metric)}</h3> <small>{escape(source)}</small>"
        cards.append(f'<div class="card">{head}{svg}</div>')
    return f'<div class="charts">{"".join(cards)}</div>'


def _table(runs: Sequence[NamedRun]) -> str:
    scores = [_scores(run.facts) for run in runs]
    names = list(dict.fromkeys(name for row in scores for name in row))[:_N_SCORES]
    settings = [_settings(run.facts) for run in runs]
    differing = _differing(settings)
    heads = ["run", "state", "#steps", *(f"#{name}" for name in names), "#steps/s", "#time"]
    heads += [f"#{name}" for name in differing]
    best = {name: _best([row.get(name) for row in scores], name) for name in names}
    rows = []
    for i, run in enumerate(runs):
        cells = [_name_cell(i, run.name), _state_cell(run.facts), _cell(run.facts.step)]
        cells += [_cell(scores[i].get(n), is_best=scores[i].get(n) == best[n]) for n in names]
        cells += _speed_cells(run.facts)
        cells += [_cell(settings[i].get(name)) for name in differing]
        rows.append(f'<tr data-run="{escape(run.name)}">{"".join(cells)}</tr>')
    return sections.sortable_table(heads, rows)


def _name_cell(index: int, name: str) -> str:
    swatch = f"<i {charts_lib.paint(index + 1, 'swatch')}></i>"
    return (
        f'<td data-v="{escape(name)}"><label><input type="checkbox" checked>{swatch}'
        f"{escape(name)}</label></td>"
    )


def _state_cell(facts: RunFacts) -> str:
    css_class, state = sections.state_of(facts)
    return f'<td data-v="{state}"><span class="state {css_class}">{state}</span></td>'


def _cell(value: Any, *, is_best: bool = False) -> str:
    if value is None:
        return '<td class="n" data-v=""></td>'
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    shown = (f"{value:,}" if isinstance(value, int) else number(value)) if is_number else value
    css_class = "n top" if is_best else "n"
    return f'<td class="{css_class}" data-v="{escape(value)}">{escape(shown)}</td>'


def _speed_cells(facts: RunFacts) -> list[str]:
    times = sections.step_times(facts)
    if not times:
        return [_cell(None), _cell(None)]
    inside, outside = sections.seconds(facts)
    rate = sections.steps_per_second(times)
    total = inside + outside
    duration = f'<td class="n" data-v="{total}">{sections.duration(total)}</td>'
    return [_cell(rate), duration]


def _scores(facts: RunFacts) -> dict[str, float]:
    """Returns the last training loss, and the best value of each metric of validation."""
    scores = {}
    for name, by_source in sections.metric_charts(facts).items():
        if sections.is_of_parameters(name):
            continue
        for source, points in by_source.items():
            if source == TRAIN and name == "loss":
                scores["train loss, last"] = points[-1].value
            elif source != TRAIN and name not in sections.LAST:
                best = _best([point.value for point in points], name)
                if best is not None:
                    scores[f"{source} {name}, best"] = best
    return scores


def _best(values: Sequence[float | None], name: str) -> float | None:
    finite = [value for value in values if value is not None and abs(value) < float("inf")]
    choose = min if _LOWER_IS_BETTER.search(name) else max
    return choose(finite, default=None)


def _settings(facts: RunFacts) -> dict[str, Any]:
    record = facts.record
    flags = {k: v for k, v in record.get("flags", {}).items() if k not in _IGNORED_FLAGS}
    settings = {"model": record.get("model"), "seed": record.get("random_seed"), **flags}
    settings |= run_record.flatten(record.get("settings") or {})
    return {name: value for name, value in settings.items() if name != "random_seed"}


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the settings that are not the same in all runs."""

    def names() -> Iterator[str]:
        for name in dict.fromkeys(name for row in settings for name in row):
            if len({repr(row.get(name)) for row in settings}) > 1:
                yield name

    return list(names())[:_N_SETTINGS]
