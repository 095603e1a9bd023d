import html.parser
import re
import shutil
import subprocess
import sys

import pytest

from tekoa.estimator import page
from tekoa.estimator.config import UsageError


class Checker(html.parser.HTMLParser):
    """Every tag is closed in order; nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


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
    assert page.show(str(trained), str(target)) == 0
    assert files_of(trained) == before
    return target.read_text()


def test_the_page_is_well_formed_and_needs_nothing_else(written):
    checker = Checker()
    checker.feed(written)
    assert checker.open == []
    assert not re.search(r"https?://|@import|url\(", written)


def test_the_page_tells_what_the_run_has(written):
    checker = Checker()
    checker.feed(written)
    text = " ".join(checker.text)
    for words in [
        *("finished", "loss", "test_accuracy", "train", "valid", "Dense_1/kernel", "(256, 10)"),
        *(
            "✓ verified",
            "warmup",
            "amos_beta",
            "milliseconds per step",
            "tekoa.models.mnist",
        ),
    ]:
        assert words in text, words


def test_a_damaged_checkpoint_is_told(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    victim = next(
        p for p in (tmp_path / "run" / "checkpoint_10" / "default").rglob("*") if p.is_file()
    )
    victim.write_bytes(victim.read_bytes() + b"x")
    page.show(str(tmp_path / "run"), str(tmp_path / "run.html"))
    text = (tmp_path / "run.html").read_text()
    assert text.count('class="no"') == 1
    assert "checkpoint_10" in text


def test_the_page_goes_where_the_command_is_called(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page.show(str(trained), None)
    assert [path.name for path in tmp_path.iterdir()] == [f"{trained.name}.html"]
    assert f"{trained.name}.html" in capsys.readouterr().out


def test_the_page_is_not_written_into_the_run_unasked(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(UsageError, match="--out"):
        page.show(".", None)
    page.show(".", "page.html")
    assert (tmp_path / "run" / "page.html").exists()


def test_the_page_may_go_to_standard_output(trained, capsys):
    page.show(str(trained), "-")
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_nothing_to_show_is_a_message(tmp_path):
    with pytest.raises(UsageError, match="nothing to show"):
        page.show(str(tmp_path), None)
    with pytest.raises(UsageError, match="no directory"):
        page.show(str(tmp_path / "no"), None)
    (tmp_path / "run.json").write_text('{"model": "m"}')
    with pytest.raises(UsageError, match="cannot be written"):
        page.show(str(tmp_path), "/proc/page.html")


def test_a_run_that_has_only_begun_is_a_page(tmp_path):
    (tmp_path / "run.json").write_text('{"model": "m", "n_steps": 100}')
    page.show(str(tmp_path), str(tmp_path / "p.html"))
    text = (tmp_path / "p.html").read_text()
    assert "No point is written yet" in text
    assert "stopped before its end" in text


def test_command_needs_no_jax(trained):
    program = (
        "import sys; from tekoa.estimator import cli;"
        f"assert cli.main(['page', {str(trained)!r}, '--out=-']) == 0;"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
