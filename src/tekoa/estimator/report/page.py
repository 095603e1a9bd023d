"""`tekoa page`: writes a run as one self-contained HTML page.

The run is not changed, and the page needs no network: curves are inline SVG.
"""

import html
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

from tekoa.core import files, messages
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.report import compare, document, sections, serve
from tekoa.estimator.report.charts import number
from tekoa.estimator.report.facts import RunFacts, gather, is_run
from tekoa.estimator.run import run_files
from tekoa.store.commit import durable
from tekoa.store.mirror import mirror


def run_page(directories: Sequence[str], config: RunConfig) -> int:
    """Writes the page of one or several runs and returns the exit code.

    Args:
        directories: The model directories, or directories of runs; training may be running.
        config: The flags. `out` is the file to write, "-" for standard output; None writes
            NAME.html to the working directory, where NAME is that of the model directory.

    Raises:
        UsageError: If there is nothing to show, or the file cannot be written.
    """
    paths = _run_directories(directories)
    if config.serve:
        serve.serve(paths, lambda: _render(_gather(paths, config), is_live=True), port=config.port)
        return ExitCode.SUCCESS
    runs = _gather(paths, config)
    problems = [problem for facts in runs for problem in facts.problems]
    for problem in problems:
        print(messages.printable(problem), file=sys.stderr)
    code = ExitCode.DAMAGED if problems else ExitCode.SUCCESS
    text = _render(runs)
    if config.out == "-":
        sys.stdout.write(text)
        return code
    target = _write(text, runs, config.out)
    size = target.stat().st_size
    print(messages.printable(f"Wrote {_relative(target)} ({size / 1e3:.0f} kB)."))
    return code


def write_page(
    directory: str | os.PathLike[str], out: str | None = None, *, diagnosis: str = ""
) -> pathlib.Path:
    """Writes the page of a run; see `run_page`.

    Args:
        directory: The directory of the run.
        out: The file to write.
        diagnosis: What `tekoa why` says about the run, to show first.

    Returns:
        The file that was written.
    """
    runs = _gather(_run_directories([os.fspath(directory)]), RunConfig())
    text = render(runs[0], diagnosis=diagnosis) if diagnosis else _render(runs)
    return _write(text, runs, out)


def _write(text: str, runs: Sequence[RunFacts], out: str | None) -> pathlib.Path:
    target = files.local_path(out).absolute() if out else _default_target(runs)
    try:
        durable.replace(target, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"Cannot write --out={target}: {error}.") from None
    return target


def _render(runs: Sequence[RunFacts], *, is_live: bool = False) -> str:
    if len(runs) == 1:
        return render(runs[0], is_live=is_live)
    return compare.render(runs, is_live=is_live)


def _run_directories(names: Sequence[str]) -> list[pathlib.Path]:
    """Returns the directories of runs: those named, and those inside a directory of runs."""
    directories: list[pathlib.Path] = []
    for name in names:
        path = mirror.fetched(name, steps="none").absolute()
        if not path.exists():
            raise UsageError(f"Directory {name!r} does not exist.")
        inside = sorted(p for p in path.iterdir() if is_run(p)) if path.is_dir() else []
        if not path.is_dir() or (len(names) > 1 and not is_run(path) and not inside):
            # A pattern of the shell, such as runs/*, matches other files too.
            if len(names) == 1:
                raise UsageError(f"{name!r} is not a directory.")
            print(messages.printable(f"{name} is not a run: left out."), file=sys.stderr)
        elif is_run(path) or not inside:
            directories.append(path)
        else:
            directories += inside
    if not directories:
        raise UsageError(
            f"There is no run in {', '.join(names)}: no {run_files.RUN_FILE}, no TensorBoard files "
            "and no checkpoints. Name the directory of a run, or one that contains runs."
        )
    return list(dict.fromkeys(directories))


def _gather(paths: Sequence[pathlib.Path], config: RunConfig) -> list[RunFacts]:
    if len(paths) > 1:
        return [gather(path, verify=None) for path in paths]
    mirror.refresh(paths[0])
    # Of a run in an object store, only what the page shows is downloaded.
    is_remote = mirror.shown(paths[0]) != str(paths[0])
    if is_remote and config.verify:
        mirror.fetched(mirror.shown(paths[0]), steps="all")
    verify = "full" if config.verify else "none" if is_remote else "size"
    facts = gather(paths[0], verify=verify)
    if facts.is_empty:
        raise UsageError(
            f"Nothing to show in {str(_relative(paths[0]))!r}: no {run_files.RUN_FILE}, no "
            "TensorBoard files and no checkpoints."
        )
    return [facts]


def _default_target(runs: Sequence[RunFacts]) -> pathlib.Path:
    cwd, directory = pathlib.Path.cwd().resolve(), runs[0].directory.resolve()
    if any(cwd.is_relative_to(facts.directory.resolve()) for facts in runs):
        raise UsageError(
            "The page would be written into the run itself. Choose a file with --out=FILE.html, "
            "or run the command from another directory."
        )
    return cwd / ("runs.html" if len(runs) > 1 else f"{directory.name}.html")


def render(facts: RunFacts, *, is_live: bool = False, diagnosis: str = "") -> str:
    """Returns the page of one run as HTML, with the diagnosis of `tekoa why` if there is one."""
    title = html.escape(facts.directory.name)
    elements = [
        _head(facts, title),
        '<div class="tiles">',
        *(
            f"<div class='tile'><span>{name}</span><b>{value}</b><small>{note}</small></div>"
            for name, value, note in _tiles(facts)
        ),
        "</div>",
        f"<h2>Diagnosis</h2><pre>{html.escape(diagnosis)}</pre>" if diagnosis else "",
        "<h2>Curves</h2><p>The legend shows the last value of each curve; a ring marks the best "
        "checkpoint.</p>",
        sections.curves(facts),
        f"<h2>Texts</h2><p></p>{sections.texts(facts)}" if facts.texts else "",
        sections.parameters(facts),
        f"<h2>Size of the steps</h2><p>By <code>tekoa scales --check</code>.</p>"
        f"<pre>{html.escape(facts.check)}</pre>"
        if facts.check
        else "",
        "<h2>Checkpoints</h2><p>A star marks the best checkpoint of a metric. Files are verified "
        "by size; <code>tekoa page --verify</code> and <code>tekoa inspect</code> verify checksums."
        "</p>",
        sections.checkpoints(facts),
        "<h2>Time</h2><p></p>",
        sections.timings(facts),
        "<h2>Settings</h2><p></p>",
        sections.settings(facts),
        document.footer(),
    ]
    return document.document(facts.directory.name, elements, is_live=is_live)


def _head(facts: RunFacts, title: str) -> str:
    css_class, state = sections.state_of(facts)
    model = facts.record.get("model")  # Only the command knows a name.
    origin = f"{html.escape(str(model))} in " if model else ""
    place = html.escape(str(_relative(facts.directory)))
    total = facts.record.get("n_steps") or facts.end_step
    percent = 100 * min(1.0, facts.step / total) if total else 0
    bar = f'<div style="width:{percent:.1f}%"></div>' if total else ""
    return (
        f'<h1>{title}<span class="state {css_class}">{state}</span></h1>'
        f'<p class="sub">{origin}<code>{place}</code></p>'
        f'<div class="bar">{bar}</div>'
    )


def _relative(path: pathlib.Path) -> pathlib.Path:
    cwd = pathlib.Path.cwd()
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path


def _tiles(facts: RunFacts) -> Iterator[tuple[str, str, str]]:
    total = facts.record.get("n_steps")
    yield "steps", f"{facts.step:,}", f"of {total:,}" if total and total >= facts.step else ""
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
        rate = sections.steps_per_second(times)
        speed = "unknown" if rate is None else f"{rate:,.4g} / s"
        yield "speed", speed, f"{1e3 / rate if rate else 0:.3g} ms per step, recent median"
        inside, outside = sections.seconds(facts)
        share = f"{time_share(inside, outside)} in steps"
        yield "time", sections.duration(inside + outside), share


def time_share(inside: float, outside: float) -> str:
    """Formats the share of time spent in training steps, in percent.

    >>> time_share(3.0, 1.0)
    '75%'
    """
    return f"{100 * inside / max(inside + outside, 1e-9):.0f}%"
