import html.parser
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.report import events, facts, page


class Checker(html.parser.HTMLParser):
    """Checks that tags are closed in order and that nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write_page(directory, out=None):
    return page.run_page([str(directory)], RunConfig(out=None if out is None else str(out)))


def files_of(directory):
    return {
        path: path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if path.name != "writer.lease"
    }


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    before = files_of(trained)
    target = tmp_path_factory.mktemp("page") / "run.html"
    assert write_page(trained, target) == 0
    assert files_of(trained) == before
    return target.read_text()


def test_page_is_well_formed_and_self_contained(written):
    checker = Checker()
    checker.feed(written)
    assert checker.open == []
    assert not re.search(r"https?://|@import|url\(", written)


def test_page_shows_the_facts_of_the_run(written):
    checker = Checker()
    checker.feed(written)
    text = " ".join(checker.text)
    for words in [
        *("finished", "loss", "test_accuracy", "train", "valid", "Dense_1/kernel", "(256, 10)"),
        *(
            "✓ complete",
            "optimizer",
            "auto",
            "milliseconds per step",
            "tekoa.models.mnist",
        ),
    ]:
        assert words in text, words


def test_damaged_checkpoint_is_shown(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    victim = next(
        p for p in (tmp_path / "run" / "checkpoint_10" / "default").rglob("*") if p.is_file()
    )
    victim.write_bytes(victim.read_bytes() + b"x")
    write_page(tmp_path / "run", tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert text.count('class="no"') == 1
    assert "checkpoint_10" in text


def test_page_is_written_to_the_working_directory_by_default(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_page(trained)
    assert [path.name for path in tmp_path.iterdir()] == [f"{trained.name}.html"]
    assert f"{trained.name}.html" in capsys.readouterr().out


def test_page_is_written_into_the_run_only_with_out(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(UsageError, match="--out"):
        write_page(".")
    write_page(".", "page.html")
    assert (tmp_path / "run" / "page.html").exists()


def test_page_can_be_written_to_standard_output(trained, capsys):
    write_page(trained, "-")
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_nothing_to_show_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="Nothing to show"):
        write_page(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        write_page(tmp_path / "no")
    (tmp_path / "run.json").write_text('{"model": "m"}')
    with pytest.raises(UsageError, match="Cannot write"):
        write_page(tmp_path, "/proc/page.html")


def test_run_without_points_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text('{"model": "m", "n_steps": 100}')
    write_page(tmp_path, tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "No points yet" in text
    assert "m in <code>" in text
    assert "incomplete" in text


def test_page_of_a_run_without_a_model_file_names_its_directory_only(tmp_path):
    (tmp_path / "run.json").write_text('{"n_steps": 100}')
    write_page(tmp_path, tmp_path / "p.html")
    assert '<p class="sub"><code>' in (tmp_path / "p.html").read_text()


def test_page_needs_no_jax(trained):
    program = (
        "import sys; from tekoa.estimator.cli import main as cli;"
        f"assert cli.main(['page', {str(trained)!r}, '--out=-']) == 0;"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


ODD = [0.0, -1.0, float("nan"), float("inf"), 1e-40]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("wall_time", [0.0, 1e300, float("nan"), -float("inf")])
def test_odd_numbers_of_a_tensorboard_file_are_shown(value, wall_time):
    points = [events.Point(step, wall_time, value, 0) for step in (-(2**63), 0, 2**63 - 1)]
    tags = ("train/loss", "train/seconds_per_step", "params/w (2,)")
    run = facts.RunFacts(
        directory=pathlib.Path("run"),
        record={},
        end_step=None,
        is_running=False,
        curves={"train": dict.fromkeys(tags, points)},
        checkpoints={},
        best=[],
    )
    assert "Curves" in page.render(run)
