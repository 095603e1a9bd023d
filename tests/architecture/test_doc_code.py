"""The code of the documents runs: every Python block of a page, and every notebook in a short form.

Blocks of a page run one after another with the names of the earlier ones, also those in tabs.
Code of other libraries, which is shown for comparison, is marked `py` and is not run. A block
after the comment `<!-- needs: package -->` runs where the package is installed.
"""

import ast
import importlib.util
import inspect
import pathlib
import re
import textwrap
import warnings

import pytest

from support import processes

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
COOKBOOK = DOCS / "cookbook"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
# Pages that run in a second or two; the others are for the slow run.
QUICK = {"checkpoints.md", "data.md", "glossary.md", "hosts.md", "model_files.md"}

# Pages whose tabs are used by the blocks after them, and which run in a few seconds.
TABBED = ("devices.md", "gan.md", "language_model.md", "lora.md", "own_step.md")


def python_blocks(page):
    blocks = re.findall(
        r"^(?:<!-- needs: (.*?) -->\n\n)?( *)```python\n(.*?)^\2```",
        page.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return [textwrap.dedent(block) for needs, _, block in blocks if has_packages(needs)]


def tabs(page):
    """The labels of a page's tabs."""
    labels = re.findall(r'^=== "(.*?)"$', page.read_text(), re.MULTILINE)
    return list(dict.fromkeys(labels))


def blocks_of_tab(page, label):
    """The Python blocks of a page, of every group of tabs only those with one label."""
    text = re.sub(
        r'^=== "(.*?)"\n((?:    .*\n|\n)*)',
        lambda tab: textwrap.dedent(tab[2]) if tab[1] == label else "",
        page.read_text(),
        flags=re.MULTILINE,
    )
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def has_packages(names):
    return all(importlib.util.find_spec(name) for name in re.findall(r"\w+", names))


PAGES = [page for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))] if python_blocks(page)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=page.relative_to(ROOT).as_posix(),
            marks=() if page.name in QUICK else pytest.mark.slow,
        )
        for page in PAGES
        if page.parent.name != "tutorials" or page.name not in TABBED
    ],
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    blocks = python_blocks(page)
    if page.parent == COOKBOOK and page.name != "index.md":
        # The recipes use the model and the data of the first page.
        blocks = python_blocks(COOKBOOK / "index.md")[:1] + blocks
    with warnings.catch_warnings():
        if "<!-- needs: " in page.read_text():
            warnings.simplefilter("ignore")  # Of the other packages.
        run_blocks(blocks, page, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "label"),
    [(page, label) for page in (DOCS / "tutorials" / n for n in TABBED) for label in tabs(page)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_tab_fits_the_rest_of_its_page(page, label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(blocks_of_tab(page, label), page, {"__name__": "page"})


def run_blocks(blocks, page, names):
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    environment = processes.environment(TEKOA_SHORT="1")
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_their_outputs(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"
    assert not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    for cell in cells:
        lines = [output.get("text", "").count("\n") for output in cell.outputs]
        assert sum(lines) <= 30, f"a wall of text after:\n{cell.source}"


def names_in_code(text):
    """Names and attributes that a piece of code uses."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def test_every_public_name_has_an_example_that_runs():
    """In its docstring, or in a block of a page."""
    from architecture.test_house import DOORS

    shown = {
        name for page in PAGES for block in python_blocks(page) for name in names_in_code(block)
    }
    missing = []
    for door in DOORS:
        package = importlib.import_module(door)
        for name in package.__all__:
            thing = getattr(package, name)
            docs = [inspect.getdoc(thing) or ""]
            if inspect.isclass(thing):
                docs += [inspect.getdoc(member) or "" for member in vars(thing).values()]
            is_code = inspect.isclass(thing) or callable(thing)
            if is_code and name not in shown and not any(">>>" in text for text in docs):
                missing.append(f"{door}.{name}")
    assert not missing
