"""The house rules that a machine can keep: who imports whom, tests, documents."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import tekoa

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tekoa"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A folder may import those of a lower rank; siblings are blind to one another.
RANKS = {
    "core": 0,
    "optim": 1,
    "bridges": 1,
    "data": 1,
    "loop": 2,
    "store": 2,
    "extensions": 3,
    "estimator": 4,
    "models": 5,
    "recipes": 6,
}
# Loaded only by those who use them.
MODEL_LIBRARIES = {"flax", "equinox", "haiku"}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def imported(path):
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path):
    folder = folder_of(path)
    if folder is None:
        return
    for module in imported(path):
        parts = module.split(".")
        if parts[0] == "tekoa" and len(parts) > 1 and parts[1] in RANKS and parts[1] != folder:
            assert RANKS[parts[1]] < RANKS[folder], f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_private_parts_of_jax_are_not_used(path):
    for module in imported(path):
        assert not re.match(r"(jax|flax|optax|orbax)\..*\b_src\b", module)
        assert module.split(".")[:2] != ["jax", "core"]
    assert "jax.core." not in path.read_text().replace("jax.extend.core.", "")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_model_libraries_stay_behind_the_bridges(path):
    if folder_of(path) in ("bridges", "models", "recipes", "estimator"):
        return
    for module in imported(path):
        assert module.split(".")[0] not in MODEL_LIBRARIES, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "recipes").glob("*.py")), ids=name_of)
def test_recipes_use_public_names_only(path):
    """A user can copy them: nothing of the package but `tekoa.NAME`, and what recipes share."""
    for module in imported(path):
        assert not module.startswith("tekoa.") or module.startswith("tekoa.recipes"), module
    for node in ast.walk(ast.parse(path.read_text())):
        is_ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_ours and node.value.id == "tekoa":
            assert node.attr in tekoa.__all__, node.attr


def test_few_files_import_tensorstore_and_none_orbax():
    def users(package):
        return [name_of(path) for path in MODULES if any(package in m for m in imported(path))]

    assert users("orbax") == []
    assert users("tensorstore") == [
        f"store/{name}.py" for name in ("array_writes", "arrays", "t5x_zarr")
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_has_its_tests(path):
    if path.name in ("__init__.py", "__main__.py"):
        return
    folder = path.relative_to(PACKAGE).parent
    assert (ROOT / "tests" / folder / f"test_{path.name}").exists()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_keep_to_their_size(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body:
                assert body[-1].end_lineno - body[0].lineno + 1 <= 60, node.name


@pytest.mark.parametrize("name", tekoa.__all__)
def test_public_names_exist_and_are_documented(name):
    thing = getattr(tekoa, name)
    assert inspect.getdoc(thing), name
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert re.search(rf"\b{name}\b", pages), f"{name} is in no page of docs/"


def test_lazy_names_agree_with_what_type_checkers_see():
    text = (PACKAGE / "__init__.py").read_text()
    seen = set(re.findall(r"^    from [\w.]+ import \w+ as (\w+)(?:  #.*)?$", text, re.MULTILINE))
    assert seen == set(tekoa.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tekoa.no_such_name


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import tekoa", "jax"),
        ("import tekoa.estimator.cli", "jax"),
        ("import tekoa.data", "jax"),
        ("import tekoa.loop.train, tekoa.extensions.files", "equinox"),
    ],
)
def test_imports_stay_cheap(code, absent):
    program = f"import sys; {code}; assert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_is_evaluated_or_pickled():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), name_of(path)
        assert not {"pickle", "dill", "cloudpickle"} & {m.split(".")[0] for m in imported(path)}


def test_every_module_imports():
    for path in MODULES:
        if path.name != "__main__.py":
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            importlib.import_module(".".join(["tekoa", *parts]).removesuffix(".__init__"))
