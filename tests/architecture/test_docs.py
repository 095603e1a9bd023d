"""The documents are true: what they name exists. Their code runs in test_doc_code.py."""

import ast
import collections
import importlib
import importlib.util
import json
import pathlib
import re
import textwrap
import types

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tekoa"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PROJECT_FILES = ["CHANGELOG", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT"]
DOORS = ["optim", "data", "store", "hosts", "sharding", "estimator", "models", "testing"]


def test_readme_starts_with_the_two_commands():
    first, second, *_ = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert "tekoa train mnist" in first
    assert "pytest" in second


def test_badges_are_true():
    readme, project = ((ROOT / name).read_text() for name in ("README.md", "pyproject.toml"))
    assert re.findall(r"badge/python-([\d.]+)%2B-", readme) == re.findall(
        r'^requires-python = ">=([\d.]+)"$', project, re.MULTILINE
    )
    assert re.findall(r"badge/license-Apache%20([\d.]+)-", readme) == re.findall(
        r'^license = .*Apache-([\d.]+)"', project, re.MULTILINE
    )


def test_documents_name_no_machine():
    code = [path for folder in ("bench", "src", "tests") for path in (ROOT / folder).rglob("*.py")]
    for page in [*project_files(), *PAGES, *code]:
        if page != pathlib.Path(__file__):
            assert not re.search(r"/work/|/root/|/home/\w+|\.venvs", page.read_text()), page.name


def test_outputs_of_notebooks_name_no_machine():
    for page in (DOCS / "notebooks").glob("*.ipynb"):
        assert not re.search(r"/tmp/|/root/|/home/|Warning", page.read_text()), page.name


def project_files():
    return [ROOT / f"{name}.md" for name in PROJECT_FILES]


def test_code_blocks_begin_as_the_site_reads_them():
    """With more than a language after the backticks, the block is shown as text."""
    for page in PAGES:
        fences = re.findall(r"^ *```(.+)$", page.read_text(), re.MULTILINE)
        assert [fence for fence in fences if not fence.isalnum()] == [], page


def test_links_point_to_files():
    wrong = []
    for page in [*project_files(), *PAGES]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong


def test_version_is_the_same_everywhere():
    version = importlib.import_module("tekoa").__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_doctests_of_the_reference_are_code_blocks():
    pytest.importorskip("griffe")
    path = DOCS / "extensions" / "fence_doctests.py"
    spec = importlib.util.spec_from_file_location("fence_doctests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.fence_doctests("Adds.\n\n>>> 1 + 1\n2\n\nText.")
    assert text == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nText."


def test_every_decision_is_in_their_index():
    decisions = (DOCS / "decisions" / "index.md").read_text()
    for page in (DOCS / "decisions").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in decisions, page.name


def test_the_reference_is_complete():
    """Every public name is in the reference, and every entry of the reference exists."""
    reference = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    entries = re.findall(r"^::: (\S+)", reference, re.MULTILINE)
    wrong = []
    for entry in entries:
        module, _, name = entry.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            wrong.append(f"{entry} does not exist")
    for door in ["tekoa", *(f"tekoa.{name}" for name in DOORS)]:
        for name in getattr(importlib.import_module(door), "__all__", ()):
            if f"{door}.{name}" not in entries and not re.search(rf"`[^`]*\b{name}\b", reference):
                wrong.append(f"{door}.{name} is missing")
    assert not wrong


def test_every_public_name_has_an_example_that_runs():
    """A doctest of its own, or a block of Python on a page or in a notebook that uses it."""
    used = {name for code in python_code() for name in names_in(ast.parse(code))}
    missing = []
    for name, _ in public_names():
        door, _, last = name.rpartition(".")
        value = getattr(importlib.import_module(door), last)
        if not isinstance(value, types.ModuleType) and last not in used and not has_doctest(value):
            missing.append(name)
    assert not missing


def python_code():
    """The Python blocks of all pages, and the cells of all notebooks."""
    for page in PAGES:
        blocks = re.findall(
            r"^( *)```python\b[^\n]*\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        yield from (textwrap.dedent(code) for _, code in blocks)
    for page in (DOCS / "notebooks").glob("*.ipynb"):
        cells = json.loads(page.read_text())["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def names_in(tree):
    """Names that code imports from Tekoa, and the attributes that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tekoa"):
            yield from (alias.name for alias in node.names)


def has_doctest(value):
    """Whether a function, or a class or one of its methods, has a doctest."""
    documented = [value] if isinstance(value, types.FunctionType | type) else []
    if isinstance(value, type):
        kinds = types.FunctionType | property | classmethod | staticmethod
        documented += [member for member in vars(value).values() if isinstance(member, kinds)]
    return any(">>> " in (item.__doc__ or "") for item in documented)


def test_architecture_names_real_files():
    """Every `path/file.py` and `path/file.py:function` of the page exists below src/tekoa."""
    text = (DOCS / "ARCHITECTURE.md").read_text()
    wrong = []
    for path, name in files_named(text):
        if not (PACKAGE / path).exists():
            wrong.append(f"{path} does not exist")
        elif name and name not in definitions(ast.parse((PACKAGE / path).read_text())):
            wrong.append(f"{path} does not define {name}")
    assert not wrong


def test_other_pages_name_real_files():
    folders = [ROOT / name for name in ("src", "tests", "bench")]
    files = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    for page in [*project_files(), *PAGES]:
        for path, _ in files_named(page.read_text()):
            is_real = "/" not in path or any(file.endswith(f"/{path}") for file in files)
            assert is_real, f"{page.relative_to(ROOT)}: {path} does not exist"


def files_named(text):
    """Pairs of a file and what is named in it, or an empty string, in the code of a page."""
    return re.findall(r"`((?:\w+/)*\w+\.py)(?::([\w.]+))?`", text)


def test_architecture_shows_every_folder():
    text = (DOCS / "ARCHITECTURE.md").read_text()
    folders = {path.parent.name for path in PACKAGE.rglob("__init__.py")} - {"tekoa"}
    assert folders == set(re.findall(r"^ *(\w+)/ ", text, re.MULTILINE))


def definitions(tree):
    """Names of functions and classes, and `Class.method`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            yield from (f"{node.name}.{method.name}" for method in methods)


def test_architecture_lists_the_types_that_cross_folders():
    text = (DOCS / "ARCHITECTURE.md").read_text()
    listed = re.search(r"^```types\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)[1]
    actual = "\n".join(
        f"{folder}: {', '.join(sorted(names))}"
        for folder, names in sorted(types_that_cross_folders().items())
    )
    assert listed == actual, f"Paste this into docs/ARCHITECTURE.md:\n\n{actual}\n"


def types_that_cross_folders():
    """Public classes of `src/tekoa` that a module of another folder uses, by home folder."""
    modules = {module_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    classes = {
        f"{module}.{node.name}"
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    homes = dict(public_names())
    crossing = collections.defaultdict(set)
    for module, tree in modules.items():
        for used in {homes.get(name, name) for name in used_names(tree)} & classes:
            folder, name = used.split(".")[1], used.split(".")[-1]
            if folder != (module + ".").split(".")[1]:
                crossing[folder].add(name)
    return crossing


def module_name(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def public_names():
    """Pairs of a public name and where it is defined, from the stubs."""
    for stub in PACKAGE.rglob("__init__.pyi"):
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield f"{module_name(stub)}.{alias.name}", f"{node.module}.{alias.name}"


def used_names(tree):
    """Dotted names that a module imports, or uses as attributes of imported modules."""
    aliases = {"tekoa": "tekoa"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    yield from aliases.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{aliases.get(node.value.id)}.{node.attr}"
