import dataclasses
import io
import re

import pytest

from tekoa.extensions.progress import ProgressBar, sparkline


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_without_a_terminal(summary):
    out = io.StringIO()
    bar = ProgressBar(3, file=out, seconds_between_lines=0)
    for step in (1, 2, 3):
        checkpoint = summary(step, train={"loss": 0.125})
        assert bar(checkpoint) is checkpoint
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["step", f"{i}/3"] for i in (1, 2, 3)]
    assert all("steps/s" in line and "loss 0.125" in line for line in lines)


def test_lines_are_limited_in_rate_except_the_last(summary):
    out = io.StringIO()
    bar = ProgressBar(3, file=out, seconds_between_lines=60)
    for step in (1, 2, 3):
        bar(summary(step))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/3", "3/3"]


def test_a_bar_on_a_terminal(summary, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    bar = ProgressBar(2, file=out)
    bar(summary(1, train={"loss": 0.125}))
    bar(summary(2, train={"loss": 0.0625}))
    assert "2/2" in out.getvalue()
    assert "loss 0.0625" in out.getvalue()


def test_an_unknown_total(summary):
    out = io.StringIO()
    bar = ProgressBar(file=out, seconds_between_lines=0)
    bar(summary(5))
    bar.close()
    assert out.getvalue().startswith("step 5 ")


def test_the_rate_is_that_of_the_steps_alone(summary):
    out = io.StringIO()
    bar = ProgressBar(file=out, seconds_between_lines=0)
    first = dataclasses.replace(
        summary(10), n_completed_steps=10, elapsed_time=20.0, compile_time=15.0
    )
    tokens = {"n_rows": 8, "n_tokens": 800}
    bar(first)
    bar(dataclasses.replace(summary(60), n_completed_steps=50, elapsed_time=1.0, setup=tokens))
    bar(
        dataclasses.replace(
            summary(61), n_completed_steps=1, elapsed_time=1.0, setup={**tokens, "n_tokens": 0}
        )
    )
    compiled, *lines = out.getvalue().splitlines()
    assert compiled == "Compiled in 15.0 s."
    assert lines[0].startswith("step 10  2 steps/s")
    assert lines[1].startswith("step 60  50 steps/s  40,000 tokens/s")
    assert lines[2].startswith("step 61  1 steps/s  8 examples/s")


def test_no_rate_is_shown_before_the_first_step(summary):
    out = io.StringIO()
    ProgressBar(file=out)(dataclasses.replace(summary(0), n_completed_steps=0, elapsed_time=0.0))
    assert "steps/s" not in out.getvalue()


def test_a_line_per_validation_with_aligned_numbers_and_a_curve_at_the_end(summary):
    out = io.StringIO()
    bar = ProgressBar(1000, file=out, lines=True, examples_per_step=32)
    for i, loss in enumerate([1.0, 0.5, 0.25, 0.125]):
        metrics = {"loss": loss / 3, "accuracy": 0.5}
        step = (1, 250, 500, 1000)[i]
        checkpoint = summary(step, train={"loss": loss}, eval=metrics)
        bar(dataclasses.replace(checkpoint, n_completed_steps=0))
    *lines, first, second = out.getvalue().splitlines()
    assert lines[0] == "step    1/1000  train loss 1        eval loss 0.3333   eval accuracy 0.5"
    assert lines[3] == "step 1000/1000  train loss 0.125    eval loss 0.04167  eval accuracy 0.5"
    assert first == "train loss  █▄▂▁  1 to 0.125"
    assert second == "eval loss   █▄▂▁  0.3333 to 0.04167"


def test_a_checkpoint_without_metrics_has_no_line(summary):
    out = io.StringIO()
    bar = ProgressBar(4, file=out, lines=True)
    bar(dataclasses.replace(summary(0, train={}), n_completed_steps=0))
    assert out.getvalue() == ""


def test_small_and_large_numbers_do_not_move_the_columns(summary):
    out = io.StringIO()
    bar = ProgressBar(4, file=out, lines=True)
    for step, loss in enumerate([12345.678, 0.0095694, 0.00037432, 0.0000374], start=1):
        checkpoint = summary(step, train={"loss": loss}, eval={"loss": 0.5})
        bar(dataclasses.replace(checkpoint, n_completed_steps=0))
    lines = out.getvalue().splitlines()[:4]
    assert len({line.index("eval loss") for line in lines}) == 1
    assert [line.split()[4] for line in lines] == ["12346", "0.00957", "0.00037", "3.7e-05"]


def test_the_bar_has_examples_and_the_validation(summary, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    out = Terminal()
    bar = ProgressBar(4, file=out, examples_per_step=32)
    bar(
        dataclasses.replace(
            summary(2, train={"loss": 0.5, "valid_accuracy": 0.75}),
            n_completed_steps=2,
            elapsed_time=1.0,
        )
    )
    bar.close()
    assert "2 steps/s" in out.getvalue()
    assert "64 examples/s" in out.getvalue()
    assert "valid accuracy 0.75" in out.getvalue()


def test_a_narrow_terminal_shows_what_fits(summary, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    bar = ProgressBar(1000, file=out, examples_per_step=32)
    metrics = {"loss": 0.25, "a_metric_with_a_long_name": 0.75}
    bar(summary(500, train={"loss": 0.5}, eval=metrics))
    bar.close()
    last = [line for line in out.getvalue().splitlines() if "500/1000" in line][-1]
    assert re.search(r"━ +500/1000 .*loss 0\.5  2 steps/s  64 examples/s", plain(last))
    assert "long_name" not in last
    assert len(plain(last).rstrip()) <= 80


def plain(text):
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text).rpartition("\r")[2]


def test_a_notebook_has_one_bar_and_no_lines(summary, monkeypatch):
    bar = ProgressBar(8, lines=True)
    monkeypatch.setattr(bar._console, "is_jupyter", True)
    updates, lines = [], []
    monkeypatch.setattr(bar, "_update_bar", lambda step, note: updates.append((step, note)))
    monkeypatch.setattr(bar, "_print", lines.append)
    for step in (1, 2, 4, 6, 8):
        bar(summary(step, train={"loss": 0.5}, eval={"accuracy": 0.75}))
    assert [step for step, _ in updates] == [1, 2, 4, 6, 8]
    assert "eval accuracy 0.75" in updates[-1][1]
    assert lines == []


def test_a_sparkline_averages_many_values_and_leaves_gaps():
    assert sparkline([3.0] * 100) == "▁" * 40
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([1e-4, 1e-2, 1.0]) == "▁▅█"
    assert sparkline(list(range(80)), width=2) == "▁█"


@pytest.mark.slow
def test_a_notebook_stores_one_bar_in_its_last_state():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell(
        "import time\n"
        "from tekoa.extensions.progress import ProgressBar\n"
        "bar = ProgressBar(200)\n"
        "bar.advance(50)\n"
        "time.sleep(0.2)\n"
        "bar.advance(100)\n"
        "bar.close()\n"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=60).execute()
    (output,) = cell.outputs
    assert output.output_type == "display_data"
    assert output.data["text/html"].startswith('<div><progress value="100" max="200">')
    assert output.data["text/plain"].startswith("100/200 steps")
