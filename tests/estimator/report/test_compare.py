import html.parser
import pathlib
import re
import time

import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.report import compare, facts, page


def table_of(text):
    """Returns the rows of the table of runs as lists of the texts of their cells."""

    class Cells(html.parser.HTMLParser):
        rows = []

        def handle_starttag(self, tag, attrs):
            if tag == "tr":
                self.rows.append([])
            elif tag in ("td", "th"):
                self.rows[-1].append("")

        def handle_data(self, data):
            if self.rows and self.rows[-1]:
                self.rows[-1][-1] += data

    cells = Cells()
    cells.rows = []
    cells.feed(re.search("<table.*?</table>", text, re.DOTALL)[0])
    return cells.rows


def test_the_table_has_the_scores_and_the_settings_that_differ(write_run, tmp_path):
    runs = [
        facts.gather(write_run(tmp_path / "a", rate=0.1, seed=1), verify=None),
        facts.gather(write_run(tmp_path / "b", rate=0.5, seed=1, is_finished=False), verify=None),
    ]
    head, *rows = table_of(compare.render(runs))
    assert head == [
        *("run", "state", "steps", "train loss, last", "valid loss, best"),
        *("valid accuracy, best", "steps/s", "time", "rate"),
    ]
    assert rows[0] == ["a", "finished", "50", "0.6065", "0.6672", "0.3935", "100", "4.1 s", "0.1"]
    assert rows[1][:3] == ["b", "incomplete", "50"]
    assert (rows[1][3], rows[1][-1]) == ("0.08208", "0.5")


def test_runs_of_fit_are_compared_by_their_best_validation(tmp_path):
    x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    result = tekoa.fit(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        (x, 3 * x),
        loss="mse",
        optimizer=optax.sgd(0.1),
        steps=4,
        batch_size=8,
        validation=(x, 3 * x),
        metrics=["r2"],
        directory=tmp_path,
        show_progress=False,
    )
    head, row = table_of(compare.render([facts.gather(tmp_path, verify=None)]))
    losses, scores = result.history["eval/loss"], result.history["eval/r2"]
    assert losses[0] > losses[-1]
    cells = dict(zip(head, row, strict=True))
    assert float(cells["eval loss, best"]) == pytest.approx(min(losses), rel=1e-3)
    assert float(cells["eval r2, best"]) == pytest.approx(max(scores), rel=1e-3)


def test_runs_are_overlaid_and_parameters_left_out(write_run, tmp_path):
    runs = [facts.gather(write_run(tmp_path / name), verify=None) for name in ("a", "b")]
    text = compare.render(runs)
    charts = re.findall(r"<h3>(\w+)</h3> <small>(\w+)</small>", text)
    assert charts == [("loss", "train"), ("loss", "valid"), ("accuracy", "valid")]
    assert text.count('data-name="a"') == text.count('data-name="b"') == 3
    assert "params/" not in text


def test_a_directory_of_runs_is_compared_and_other_files_left_out(
    write_run, tmp_path, monkeypatch, capsys
):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert page.run_page(["runs"], RunConfig()) == 0
    assert "Wrote runs.html" in capsys.readouterr().out
    directory = pathlib.Path("runs.html").read_text()
    assert page.run_page(["runs/a", "runs/b", "runs/notes.txt"], RunConfig()) == 0
    assert "notes.txt is not a run: left out." in capsys.readouterr().err
    pattern = pathlib.Path("runs.html").read_text()
    assert table_of(directory) == table_of(pattern)
    with pytest.raises(UsageError, match="does not exist"):
        page.run_page(["runs/a", "runs/c"], RunConfig())


@pytest.mark.slow
def test_a_hundred_runs_take_seconds_and_less_than_three_megabytes(write_run, tmp_path):
    for i in range(100):
        write_run(tmp_path / "runs" / f"run{i:03d}", rate=0.01 * i, n_checks=200)
    start = time.process_time()
    assert page.run_page([str(tmp_path / "runs")], RunConfig(out=str(tmp_path / "a.html"))) == 0
    assert time.process_time() - start < 5  # Of processor time, which load does not change.
    text = (tmp_path / "a.html").read_text()
    assert len(text) < 3e6
    assert text.count("data-run=") == 100
    hues = re.findall(r'class="swatch (?:c\d|hue" style="--hue:\d+)', text)
    assert len(set(hues)) > 90
