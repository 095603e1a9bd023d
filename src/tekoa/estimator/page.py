"""`tekoa page`: a run as one HTML page that needs nothing else.

No file of the run is changed, and no network is used: curves are inline SVG.
"""

import html
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator

from tekoa.estimator import page_sections as sections
from tekoa.estimator import run_files
from tekoa.estimator.config import UsageError
from tekoa.estimator.page_chart import number
from tekoa.estimator.page_facts import RunFacts, gather
from tekoa.store import files


def show(directory: str, out: str | None) -> int:
    """Writes the page of a model dir; gives the exit code.

    Args:
        directory: The model dir; training may be going on.
        out: The file to write, "-" for standard output; None: NAME.html in the working
            directory, where NAME is that of the model dir.

    Raises:
        UsageError: If there is nothing to show, or the file cannot be written.
    """
    path = pathlib.Path(directory).expanduser().absolute()
    if not path.is_dir():
        raise UsageError(f"There is no directory {directory!r}.")
    facts = gather(path)
    if facts.is_empty:
        raise UsageError(
            f"{directory} has nothing to show: no {run_files.RUN_FILE}, no TensorBoard files, no "
            f"checkpoints. `tekoa train MODEL --model_dir={directory}` makes them."
        )
    text = render(facts)
    if out == "-":
        sys.stdout.write(text)
        return 0
    target = pathlib.Path(out).expanduser().absolute() if out else _default(path)
    try:
        files.replace(target, text.encode())
    except OSError as error:
        raise UsageError(f"--out={target} cannot be written: {error}.") from None
    print(f"Wrote {_seen_from_here(target)}, {len(text) / 1e3:.0f} kB.")
    return 0


def _default(directory: pathlib.Path) -> pathlib.Path:
    here, directory = pathlib.Path.cwd().resolve(), directory.resolve()
    if here.is_relative_to(directory):
        raise UsageError(
            "The page would be written into the run itself. Say where by --out=FILE.html, or "
            "call from another directory."
        )
    return here / f"{directory.name}.html"


def render(facts: RunFacts) -> str:
    """Gives the whole page."""
    title = html.escape(facts.directory.name)
    parts = [
        _head(facts, title),
        '<div class="tiles">',
        *(
            f"<div class='tile'><span>{name}</span><b>{value}</b><small>{note}</small></div>"
            for name, value, note in _tiles(facts)
        ),
        "</div>",
        "<h2>Curves</h2><p>The last value of each curve stands beside its name; a ring marks the "
        "best checkpoint.</p>",
        sections.curves(facts),
        "<h2>Scales of the parameters</h2><p>Root mean square of the entries. The dashed line is "
        "eta, the scale that Amos expects of them; the bar reaches from eta to the value, ten "
        "times less to ten times more.</p>"
        if facts.record.get("scales")
        else "<h2>Scales of the parameters</h2><p>Root mean square of the entries.</p>",
        sections.parameters(facts),
        "<h2>Checkpoints</h2><p>A star marks where a step is the best of a metric.</p>",
        sections.checkpoints(facts),
        "<h2>Time</h2><p></p>",
        sections.timings(facts),
        "<h2>Settings</h2><p></p>",
        sections.settings(facts),
        f"<footer>Written by tekoa page, {sections.clock(time.time())}. Curves of many points are "
        "drawn by their extremes.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_beside('page.css')}</style></head>"
        f"<body><main>{''.join(parts)}</main><script>{_beside('page.js')}</script></body></html>\n"
    )


def _beside(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text()


def _head(facts: RunFacts, title: str) -> str:
    kind, words = "off", "stopped before its end"
    if facts.end_step is not None:
        kind, words = "done", "finished"
    elif facts.is_running:
        kind, words = "on", "running"
    model = html.escape(str(facts.record.get("model", "a model that no run.json names")))
    place = html.escape(str(_seen_from_here(facts.directory)))
    total = facts.record.get("n_steps") or facts.end_step
    share = min(1.0, facts.step / total) if total else None
    bar = "" if share is None else f'<div style="width:{100 * share:.1f}%"></div>'
    return (
        f'<h1>{title}<span class="state {kind}">{words}</span></h1>'
        f'<p class="sub">{model} in <code>{place}</code></p>'
        f'<div class="bar">{bar}</div>'
    )


def _seen_from_here(directory: pathlib.Path) -> pathlib.Path:
    here = pathlib.Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory


def _tiles(facts: RunFacts) -> Iterator[tuple[str, str, str]]:
    total = facts.record.get("n_steps")
    yield "steps", f"{facts.step:,}", f"of {total:,}" if total else ""
    charts = sections.metric_charts(facts)
    for name in ("loss", "cost"):
        points = charts.get(name, {}).get("train")
        if points:
            yield f"training {name}", number(points[-1].value), f"at step {points[-1].step:,}"
            break
    for best in facts.best:
        if best.score is not None and best.step is not None:
            name = f"best {html.escape(best.metric)}"
            yield name, number(float(best.score)), f"at step {best.step:,}"
    speed = facts.curves.get("train", {}).get(f"train/{sections.SPEED}", [])
    if speed:
        last = statistics.median(point.value for point in speed[-20:])
        yield "speed", f"{1 / last:,.4g} / s", f"{1e3 * last:.3g} ms per step, lately"
        inside, outside = sections.seconds(facts)
        yield (
            "time",
            sections.duration(inside + outside),
            f"{clock_share(inside, outside)} in steps",
        )


def clock_share(inside: float, outside: float) -> str:
    """The part of the time that went into steps, in percent.

    >>> clock_share(3.0, 1.0)
    '75 %'
    """
    return f"{100 * inside / max(inside + outside, 1e-9):.0f} %"
