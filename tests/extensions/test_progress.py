import dataclasses
import io

from tekoa.extensions.progress import ProgressBar


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


def test_the_rate_is_measured_since_the_previous_checkpoint(summary, monkeypatch):
    """The first segment compiles: its low rate must not affect later ones."""
    now = iter([100.0, 101.0])
    monkeypatch.setattr("tekoa.extensions.progress.time.monotonic", lambda: next(now))
    out = io.StringIO()
    bar = ProgressBar(file=out, seconds_between_lines=0)
    bar(dataclasses.replace(summary(10), n_completed_steps=10, elapsed_time=20.0))
    bar(dataclasses.replace(summary(60), n_completed_steps=50, elapsed_time=1.0))
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["0.5", "50"]


def test_no_rate_is_shown_before_the_first_step(summary):
    out = io.StringIO()
    ProgressBar(file=out)(dataclasses.replace(summary(0), n_completed_steps=0, elapsed_time=0.0))
    assert "steps/s" not in out.getvalue()
