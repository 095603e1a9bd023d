"""The house rules that a machine can check: imports, sizes, doors, tests, documentation."""

import ast
import collections
import graphlib
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
TREES = {path: ast.parse(path.read_text()) for path in MODULES}

# A folder may import folders of a lower rank. Siblings do not import one another.
RANKS = {
    "core": 0,
    "hosts": 0,
    "sharding": 1,
    "optim": 1,
    "bridges": 2,
    "data": 2,
    "loop": 3,
    "store": 3,
    "exchange": 4,
    "extensions": 4,
    "testing": 5,
    "estimator": 5,
    "fitting": 6,
    "compat": 6,
    "models": 6,
    "recipes": 7,
}
# The public pages. What lies deeper is private.
DOORS = [
    "tekoa",
    "tekoa.data",
    "tekoa.estimator",
    "tekoa.hosts",
    "tekoa.models",
    "tekoa.optim",
    "tekoa.sharding",
    "tekoa.store",
    "tekoa.testing",
]
# Modules that users of other systems know by name; they lie behind no door of ours.
HELD_MODULES = [
    "tekoa.combinator",
    "tekoa.compat.jestimator",
    "tekoa.estimator.modeling",
    "tekoa.optim.amos",
    "tekoa.optim.amos_helper",
    "tekoa.optim.classic",
    "tekoa.optim.triples",
    "tekoa.random",
    "tekoa.store.errors",
    "tekoa.store.t5x",
]
HELD_NAMES = [
    "tekoa.optim.amos.amos",
    "tekoa.optim.amos_helper.params_fn_from_assign_map",
    "tekoa.optim.amos_helper.evaluate",
    "tekoa.optim.classic.adam",
    "tekoa.store.t5x.read",
    "tekoa.store.t5x.write",
    "tekoa.combinator.serial",
    "tekoa.random.sequence",
    "tekoa.models.RNNLM",
]
MODEL_LIBRARIES = {"flax", "equinox", "haiku"}
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES = 12, 400, 60


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported(tree):
    """Every module that a file imports, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def documents():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if "decisions" not in page.parts]


def test_imports_go_one_way():
    wrong = []
    for path, tree in TREES.items():
        folder = folder_of(path)
        for module in imported(tree):
            parts = module.split(".")
            is_other = parts[0] == "tekoa" and len(parts) > 1 and parts[1] != folder
            if folder in RANKS and is_other and RANKS.get(parts[1], -1) >= RANKS[folder]:
                wrong.append(f"{name_of(path)} imports {module}")
    assert not wrong


def test_no_import_cycle():
    """No module needs itself at import time, by whatever detour."""
    modules = {module_of(path): path for path in MODULES}
    graph = {}
    for name, path in modules.items():
        statements = [node for node in TREES[path].body if not isinstance(node, ast.FunctionDef)]
        tree = ast.Module(body=statements, type_ignores=[])
        graph[name] = {module for module in imported(tree) if module in modules} - {name}
        # `from package import module` needs the module; the package's door is lazy.
        graph[name] = {
            module
            for module in graph[name]
            if not any(other.startswith(f"{module}.") for other in graph[name])
        }
    list(graphlib.TopologicalSorter(graph).static_order())


def test_folders_are_small_and_prefixes_are_folders():
    wrong = []
    for folder in {path.parent for path in MODULES}:
        modules = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
        families = collections.Counter(m.split("_")[0] for m in modules if "_" in m.lstrip("_"))
        wrong += [
            f"{name_of(folder)}: {p}_*" for p, n in families.items() if n + (p in modules) > 3
        ]
        if len(modules) > MAX_MODULES:
            wrong.append(f"{name_of(folder)} has {len(modules)} modules")
    assert not wrong


def test_modules_and_functions_keep_to_their_size():
    wrong = []
    for path, tree in TREES.items():
        n_lines = path.read_text().count("\n")
        if n_lines > MAX_LINES:
            wrong.append(f"{name_of(path)} has {n_lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and body[-1].end_lineno - body[0].lineno + 1 > MAX_FUNCTION_LINES:
                    wrong.append(f"{name_of(path)}:{node.name} is too long")
    assert not wrong


def test_private_parts_of_jax_are_not_used():
    wrong = []
    for path, tree in TREES.items():
        wrong += [
            f"{name_of(path)} imports {module}"
            for module in imported(tree)
            if re.match(r"(jax|flax|optax|orbax)\..*\b_src\b", module)
            or module.split(".")[:2] == ["jax", "core"]
        ]
        if "jax.core." in path.read_text().replace("jax.extend.core.", ""):
            wrong.append(f"{name_of(path)} names jax.core")
    assert not wrong


def test_model_libraries_stay_behind_the_bridges():
    for path, tree in TREES.items():
        if folder_of(path) not in ("bridges", "models", "recipes", "estimator"):
            libraries = {module.split(".")[0] for module in imported(tree)} & MODEL_LIBRARIES
            # The msgpack file of T5X is Flax's own format; `flax.serialization` imports no model.
            assert not libraries or name_of(path) == "store/formats/t5x/msgpack.py", name_of(path)


def test_few_files_import_tensorstore_and_none_orbax():
    def users(package):
        return {
            name_of(path) for path in MODULES if any(package in m for m in imported(TREES[path]))
        }

    assert users("orbax") == set()
    assert users("tensorstore") == {
        "store/formats/arrays_read.py",
        "store/formats/arrays_write.py",
        "store/formats/t5x/zarr.py",
    }


def is_public(module):
    """Whether a dotted name is reached through the doors alone."""
    package, _, name = module.rpartition(".")
    if module in DOORS + HELD_MODULES or package in HELD_MODULES:
        return True
    return package in DOORS and name in importlib.import_module(package).__all__


@pytest.mark.parametrize("folder", ["recipes", "models", "estimator/starters"])
def test_recipes_and_models_use_public_names_only(folder):
    """A user can copy them."""
    wrong = []
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    is_own = node.module.startswith(f"tekoa.{folder}") or name == "tekoa._lazy"
                    if node.module.startswith("tekoa") and not is_own and not is_public(name):
                        wrong.append(f"{name_of(path)}: {name}")
            is_ours = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "tekoa"
            if is_ours and node.attr not in tekoa.__all__:
                wrong.append(f"{name_of(path)}: tekoa.{node.attr}")
    assert not wrong


def test_documents_import_through_the_doors_only():
    wrong = []
    for page in documents():
        for block in re.findall(
            r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tekoa"):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    wrong += [f"{page.name}: {name}" for name in names if not is_public(name)]
                elif isinstance(node, ast.Import):
                    names = [a.name for a in node.names if a.name.startswith("tekoa")]
                    wrong += [f"{page.name}: {n}" for n in names if n not in DOORS + HELD_MODULES]
    assert not wrong


@pytest.mark.parametrize("name", HELD_NAMES)
def test_names_that_users_bring_along_import(name):
    module, _, attribute = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize("door", DOORS)
def test_every_name_of_a_door_is_there_and_hides_no_module(door):
    package = importlib.import_module(door)
    folder = pathlib.Path(package.__file__).parent
    for name in package.__all__:
        thing = getattr(package, name)
        is_module = (folder / name).is_dir() or (folder / f"{name}.py").exists()
        assert not is_module or inspect.ismodule(thing), f"{door}.{name}"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


def test_every_module_has_its_tests():
    wrong = []
    for path in MODULES:
        relative = path.relative_to(PACKAGE)
        is_shim = all(
            isinstance(n, ast.Expr | ast.ImportFrom | ast.Import) for n in TREES[path].body
        )
        test = ROOT / "tests" / relative.parent / f"test_{path.name.lstrip('_')}"
        if not path.name.startswith("__") and not is_shim and not test.exists():
            wrong.append(name_of(path))
    assert not wrong


@pytest.mark.parametrize("door", DOORS)
def test_public_names_are_documented(door):
    package = importlib.import_module(door)
    pages = "".join(page.read_text() for page in documents())
    for name in package.__all__:
        thing = getattr(package, name)
        assert inspect.getdoc(thing), name
        assert re.search(rf"\b{name}\b", pages), f"{door}.{name} is in no page of docs/"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import tekoa", "jax"),
        ("import tekoa.estimator.cli.main", "jax"),
        ("import tekoa.estimator.cli.main as m; m.main(['--help'])", "absl"),
        ("import tekoa.estimator.cli.main as m; m.main(['--help'])", "tekoa.hosts.group"),
        ("import tekoa.estimator.cli.main as m; m.main(['--help'])", "uuid"),
        ("import tekoa.data, tekoa.data.patterns", "jax"),
        ("import tekoa.loop.train, tekoa.extensions.checkpoint_files", "equinox"),
    ],
)
def test_imports_stay_cheap(code, absent):
    program = f"import sys; {code}; assert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_is_evaluated_or_pickled():
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), name_of(path)
        assert not {"pickle", "dill", "cloudpickle"} & {m.split(".")[0] for m in imported(tree)}


def test_every_module_imports():
    for path in MODULES:
        if path.name != "__main__.py":
            importlib.import_module(module_of(path))
