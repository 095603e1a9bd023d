"""What the documents say is true: their code runs."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
COOKBOOK = ROOT / "docs" / "cookbook"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *COOKBOOK.glob("*.md")])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    blocks = python_blocks(page)
    if page.parent == COOKBOOK and page.name != "index.md":
        # The recipes go on from the model and the data of their first page.
        blocks = python_blocks(COOKBOOK / "index.md")[:1] + blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_readme_starts_with_the_two_commands():
    first, second, *_ = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert "tekoa train mnist" in first
    assert "pytest" in second


def test_documents_speak_of_no_machine():
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"/work/|/root/|/home/\w+|\.venvs", page.read_text()), page.name
