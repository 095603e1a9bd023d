"""`tekoa page`: writes a run as one self-contained HTML page.

The run is not changed, and the page needs no network: curves are inline SVG.
"""

import html
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator

from tekoa.core import files, messages
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.report import sections
from tekoa.estimator.report.charts import number
from tekoa.estimator.report.facts import RunFacts, gather
from tekoa.estimator.run import run_files
from tekoa.store.commit import durable


def run_page(directory: str, config: RunConfig) -> int:
    """Writes the page of a run and returns the exit code.

    Args:
        directory: The model directory; training may be running.
        config: The flags. `out` is the file to write, "-" for standard output; None writes
            NAME.html to the working directory, where NAME is that of the model directory.

    Raises:
        UsageError: If there is nothing to show, or the file cannot be written.
    """
    facts = _facts(directory)
    for problem in facts.problems:
        print(messages.printable(problem), file=sys.stderr)
    code = ExitCode.DAMAGED if facts.problems else ExitCode.SUCCESS
    if config.out == "-":
        sys.stdout.write(render(facts))
        return code
    target = _write(facts, config.out)
    size = target.stat().st_size
    print(messages.printable(f"Wrote {_relative(target)} ({size / 1e3:.0f} kB)."))
    return code


def write_page(directory: str | os.PathLike[str], out: str | None = None) -> pathlib.Path:
    """Writes the page of a run; see `run_page`.

    Returns:
        The file that was written.
    """
    return _write(_facts(directory), out)


def _write(facts: RunFacts, out: str | None) -> pathlib.Path:
    text = render(facts)
    target = files.local_path(out).absolute() if out else _default_target(facts.directory)
    try:
        durable.replace(target, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"Cannot write --out={target}: {error}.") from None
    return target


def _facts(directory: str | os.PathLike[str]) -> RunFacts:
    path = files.local_path(directory).absolute()
    if not path.is_dir():
        raise UsageError(f"Directory {str(directory)!r} does not exist.")
    facts = gather(path)
    if facts.is_empty:
        raise UsageError(
            f"Nothing to show in {str(directory)!r}: no {run_files.RUN_FILE}, no TensorBoard files "
            "and no checkpoints."
        )
    return facts


def _default_target(directory: pathlib.Path) -> pathlib.Path:
    cwd, directory = pathlib.Path.cwd().resolve(), directory.resolve()
    if cwd.is_relative_to(directory):
        raise UsageError(
            "The page would be written into the run itself. Choose a file with --out=FILE.html, "
            "or run the command from another directory."
        )
    return cwd / f"{directory.name}.html"


def render(facts: RunFacts) -> str:
    """Returns the page as HTML."""
    title = html.escape(facts.directory.name)
    elements = [
        _head(facts, title),
        '<div class="tiles">',
        *(
            f"<div class='tile'><span>{name}</span><b>{value}</b><small>{note}</small></div>"
            for name, value, note in _tiles(facts)
        ),
        "</div>",
        "<h2>Curves</h2><p>The legend shows the last value of each curve; a ring marks the best "
        "checkpoint.</p>",
        sections.curves(facts),
        "<h2>Parameter scales</h2><p>Root mean square of the entries.",
        " The dashed line is eta, the scale that Amos expects. The bar shows the ratio RMS / eta, "
        "from a tenth to ten times."
        if facts.record.get("scales")
        else "",
        "</p>",
        sections.parameters(facts),
        "<h2>Checkpoints</h2><p>A star marks the best checkpoint of a metric. Files are verified "
        "by size; <code>tekoa inspect</code> verifies checksums.</p>",
        sections.checkpoints(facts),
        "<h2>Time</h2><p></p>",
        sections.timings(facts),
        "<h2>Settings</h2><p></p>",
        sections.settings(facts),
        f"<footer>Written by tekoa page, {sections.clock(time.time())}. Long curves are reduced to "
        "their extremes.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_asset('page.css')}</style></head>"
        f"<body><main>{''.join(elements)}</main><script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text()


def _head(facts: RunFacts, title: str) -> str:
    css_class, state = "off", "incomplete"
    if facts.end_step is not None:
        css_class, state = "done", "finished"
    elif facts.is_running:
        css_class, state = "on", "running"
    model = html.escape(str(facts.record.get("model", "unknown model")))
    place = html.escape(str(_relative(facts.directory)))
    total = facts.record.get("n_steps") or facts.end_step
    percent = 100 * min(1.0, facts.step / total) if total else 0
    bar = f'<div style="width:{percent:.1f}%"></div>' if total else ""
    return (
        f'<h1>{title}<span class="state {css_class}">{state}</span></h1>'
        f'<p class="sub">{model} in <code>{place}</code></p>'
        f'<div class="bar">{bar}</div>'
    )


def _relative(path: pathlib.Path) -> pathlib.Path:
    cwd = pathlib.Path.cwd()
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path


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
            yield name, number(best.score), f"at step {best.step:,}"
    times = sections.step_times(facts)
    if times:
        recent = statistics.median(point.value for point in times[-20:])
        speed = f"{1 / recent:,.4g} / s" if recent > 0 else "unknown"
        yield "speed", speed, f"{1e3 * recent:.3g} ms per step, recent median"
        inside, outside = sections.seconds(facts)
        share = f"{time_share(inside, outside)} in steps"
        yield "time", sections.duration(inside + outside), share


def time_share(inside: float, outside: float) -> str:
    """Formats the share of time spent in training steps, in percent.

    >>> time_share(3.0, 1.0)
    '75%'
    """
    return f"{100 * inside / max(inside + outside, 1e-9):.0f}%"
