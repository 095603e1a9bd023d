"""The code of a model that one run uses, from its file and the files beside it."""

import ast
import dataclasses
import functools
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flax import linen as nn

from tekoa import sharding
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import edits, fold, trim
from tekoa.estimator.eject.edits import Edit, Source
from tekoa.estimator.eject.fold import is_literal
from tekoa.estimator.eject.watch import Watch
from tekoa.estimator.model_file import lora

# What stands for names of Tekoa in the ejected file; "" if another part of the file defines it.
STAND_INS = {
    "DataError": "DataError = ValueError",
    "DataFacts": "",
    "Experiment": "",
    "Mean": 'Mean = collections.namedtuple("Mean", "total count")',
    "MeanMetrics": "",
    "ModelFns": "ModelFns = types.SimpleNamespace",
    "TrainState": "",
    "UsageError": "UsageError = ValueError",
    "amos": "",
}
# Arguments that the ejected file does not need: what only evaluation uses, and the scales of Amos,
# which are in a table.
_NOT_USED: dict[str, set[Any]] = {
    "Experiment": {"metrics", "predict", "finish", "reduction", "text"},
    "amos": {1, 2, "eta_fn", "shape_fn"},
}
# They return their first argument, without a mesh and without adapters.
_IDENTITIES = (sharding.constrain, lora.adapted, nn.with_logical_partitioning)
_MODELS = "tekoa.models."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The code of a model that goes into the ejected file.

    Attributes:
        imports: Lines that import other packages.
        stand_ins: Lines that replace names of Tekoa.
        definitions: The text of each definition by name, in order.
        tekoa_names: The names of Tekoa that are used.
        drops_boxes: Whether logical axes of parameters were left out.
        drops_metrics: Whether the metrics that the loss returns were left out.
    """

    imports: tuple[str, ...]
    stand_ins: tuple[str, ...]
    definitions: dict[str, str]
    tekoa_names: frozenset[str]
    drops_boxes: bool = False
    drops_metrics: bool = False

    def loads(self, name: str) -> bool:
        """Whether a definition reads a name."""
        return any(name in edits.loaded_names(ast.parse(t)) for t in self.definitions.values())


class ModelFiles:
    """A model file and the modules it was written with: those beside it, and bundled helpers.

    Args:
        module: The model file.
    """

    def __init__(self, module: types.ModuleType):
        self.main = module
        folder = pathlib.Path(module.__file__ or "").parent
        own = [
            other
            for other in [*sys.modules.values()]
            if isinstance(getattr(other, "__file__", None), str)
            and (
                other.__name__.startswith(_MODELS)
                if module.__name__.startswith(_MODELS)
                else pathlib.Path(other.__file__ or "").parent == folder
            )
        ]
        self.modules = {other.__name__: other for other in [*own, module]}

    @property
    def files(self) -> list[str]:
        """The files."""
        return [module.__file__ or "" for module in self.modules.values()]

    def read(
        self,
        roots: Sequence[str],
        watch: Watch,
        *,
        settings: tuple[Any, ...],
        replaced: Collection[str] = (),
        loss: str = "",
    ) -> ModelSource:
        """Selects what some functions of the model file need.

        Args:
            roots: The functions.
            watch: What ran, in these files.
            settings: Objects whose entries are replaced by their values.
            replaced: Parts of an `Experiment` that the ejected file has in another form.
            loss: The name of the loss function, whose metrics are left out.

        Raises:
            UsageError: If the code uses something of Tekoa that has no plain equivalent.
        """
        without_metrics: list[str] = []

        @functools.cache
        def text_of(name: str) -> str:
            module = self.modules[name]
            rules = [trim.short_docstrings, trim.no_annotations]
            rules += [trim.first_argument(_is_identity(module)), trim.without_effect]
            rules += [trim.never_reached, trim.unused_parameters, trim.unused_items]
            rules += [trim.without_metrics(loss)] if loss else []
            if module is self.main:
                builders = _builders(module, watch, settings)
                not_used = {*_NOT_USED["Experiment"], *replaced}
                rules += [
                    _without_arguments(module, {**_NOT_USED, "Experiment": not_used}),
                    fold.with_values(builders, settings),
                    trim.results_used([name for name in builders if name in roots]),
                    fold.without_parameters(builders, settings),
                    trim.direct_returns,
                    trim.without_aliases,
                ]
            text = pathlib.Path(module.__file__ or "").read_text()
            text = trim.only_what_ran(text, watch.lines.get(module.__file__ or "", {}))
            if trim.returns_metrics(text, loss):
                without_metrics.append(name)
            return edits.apply(text, *rules, trim.on_one_line)

        source = _Selection(self, text_of).select(roots)
        original = pathlib.Path(self.main.__file__ or "").read_text()
        drops_boxes = nn.with_logical_partitioning.__name__ in original
        return dataclasses.replace(
            source, drops_boxes=drops_boxes, drops_metrics=bool(without_metrics)
        )


def _builders(
    module: types.ModuleType, watch: Watch, settings: tuple[Any, ...]
) -> dict[str, dict[str, Any]]:
    """Returns the variables of the functions that were called with settings, by name."""
    functions = {
        name: value for name, value in vars(module).items() if isinstance(value, types.FunctionType)
    }
    calls = {name: watch.variables(function) for name, function in functions.items()}
    common = {name: _common(variables) for name, variables in calls.items() if variables}
    return {
        name: variables
        for name, variables in common.items()
        if any(value is setting for value in variables.values() for setting in settings)
    }


def _common(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the variables that were the same in all calls."""
    return {
        name: value
        for name, value in calls[-1].items()
        if all(
            name in call and (call[name] is value or (is_literal(value) and call[name] == value))
            for call in calls
        )
    }


def _resolve(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """Returns the object that `a.b.c` names in a module, or None."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(node.value, namespace), node.attr, None)
    return None


def _is_identity(module: types.ModuleType) -> Any:
    def is_identity(node: ast.expr) -> bool:
        value = _resolve(node, vars(module))
        return any(value is function for function in _IDENTITIES)

    return is_identity


def _without_arguments(module: types.ModuleType, dropped: Mapping[str, set[Any]]) -> edits.Rule:
    """Creates the rule that removes arguments of calls, by the name of the function of Tekoa."""

    def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = _resolve(call.func, vars(module))
            if not str(getattr(function, "__module__", "")).startswith("tekoa."):
                continue
            removed = dropped.get(getattr(function, "__name__", ""), set())
            words = [*call.args, *call.keywords]
            for i, word in enumerate(words):
                if (word.arg if isinstance(word, ast.keyword) else i) in removed:
                    yield source.without_item(words, i)
                    return

    return rule


class _Selection:
    """Follows names from definition to definition."""

    def __init__(self, files: ModelFiles, text_of: Callable[[str], str]):
        self._files, self._text_of = files, text_of
        self._imports: dict[str, None] = {}
        self._tekoa: set[str] = set()
        self._owners: dict[str, str] = {}
        self._chosen: dict[tuple[str, int], tuple[str, str]] = {}

    def select(self, roots: Sequence[str]) -> ModelSource:
        for root in roots:
            self._add(self._files.main.__name__, root)
        main = self._files.main.__name__
        order = sorted(self._chosen, key=lambda key: (key[0] == main, key[0], key[1]))
        return ModelSource(
            imports=tuple(self._imports),
            stand_ins=tuple(filter(None, (STAND_INS[name] for name in sorted(self._tekoa)))),
            definitions=dict(self._chosen[key] for key in order),
            tekoa_names=frozenset(self._tekoa),
        )

    def _add(self, module: str, name: str) -> None:
        """Adds the definition of a name, and all that it needs."""
        tree = ast.parse(self._text_of(module))
        node = next((node for node in tree.body if name in bound_names(node)), None)
        if node is None or (module, node.lineno) in self._chosen:
            return
        if self._owners.setdefault(name, module) != module:
            raise UsageError(
                f"{name!r} is defined in {module} and in {self._owners[name]}: rename one of the "
                "two to eject this run."
            )
        self._chosen[module, node.lineno] = (name, "")  # Before those that it needs.
        source = Source(self._text_of(module))
        edit = source.without(node)
        text = source.data[edit.start : edit.end].decode().strip("\n")
        self._chosen[module, node.lineno] = (name, self._renamed(module, text))

    def _renamed(self, module: str, text: str) -> str:
        """Returns a definition with the names of the ejected file, after adding what it needs."""
        imports = _imported(ast.parse(self._text_of(module)))
        for name in local_names(ast.parse(text)):
            imports.pop(name, None)

        def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
            for node in ast.walk(tree):
                if isinstance(node, (ast.Name, ast.Attribute)):
                    target = self._target(module, node, imports)
                    if target is not None and target != source.text(node):
                        yield source.replaced(node, target)

        return edits.apply(text, rule)

    def _target(
        self, module: str, node: ast.Name | ast.Attribute, imports: Mapping[str, ast.stmt]
    ) -> str | None:
        """Returns what stands for a name, or None; adds the definition or the import it needs."""
        path = _dotted(node)
        if path is None or not isinstance(node.ctx, ast.Load):
            return None
        root, *rest = path
        if root not in imports:
            if not rest:
                self._add(module, root)
            return None
        imported, name = _import_of(imports[root], root)
        if imported in self._files.modules:  # A module, or a name of one.
            full = [name, *rest] if name else rest
            if len(full) == 1:
                self._add(imported, full[0])
                return full[0]
            return None
        if name and f"{imported}.{name}" in self._files.modules:
            if len(rest) == 1:
                self._add(f"{imported}.{name}", rest[0])
                return rest[0]
            return None
        if imported.partition(".")[0] != "tekoa":
            self._imports[ast.unparse(_alone(imports[root], root))] = None
            return None
        return self._stand_in(module, node, name, rest)

    def _stand_in(self, module: str, node: Any, name: str | None, rest: list[str]) -> str | None:
        value = _resolve(node, vars(self._files.modules[module]))
        if isinstance(value, types.ModuleType):
            return None  # A part of a longer name.
        last = ([name] if name else []) + rest
        if len(last) > 1 and last[0] in STAND_INS:
            return None  # An attribute of one.
        if not last or last[-1] not in STAND_INS:
            if value is None:
                return None
            file = pathlib.Path(self._files.modules[module].__file__ or "").name
            raise UsageError(
                f"{file}: {'.'.join(last) or 'tekoa'!r} of Tekoa has no plain equivalent, so this "
                "run cannot be ejected."
            )
        self._tekoa.add(last[-1])
        return last[-1]


def bound_names(node: ast.stmt) -> list[str]:
    """Returns the names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if not isinstance(node, ast.Assign):
        return []
    parts = (part for target in node.targets for part in ast.walk(target))
    return [part.id for part in parts if isinstance(part, ast.Name)]


def local_names(tree: ast.AST) -> set[str]:
    """Returns the names that functions inside a definition bind."""
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    names = {arg.arg for function in functions for arg in edits.arguments(function)}
    inner = [node for function in functions for node in ast.walk(function)]
    return names | {
        node.id for node in inner if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _imported(tree: ast.Module) -> dict[str, ast.stmt]:
    """Returns the import of each name that a file imports."""
    return {
        alias.asname or alias.name.partition(".")[0]: node
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def _import_of(node: ast.stmt, bound: str) -> tuple[str, str | None]:
    """Returns the module and, if there is one, the name in it, for an imported name."""
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    alias = _alias(node, bound)
    if isinstance(node, ast.ImportFrom):
        return node.module or "", alias.name
    return (alias.name if alias.asname else bound), None


def _alias(node: ast.Import | ast.ImportFrom, bound: str) -> ast.alias:
    return next(a for a in node.names if bound in (a.asname, a.name.partition(".")[0]))


def _alone(node: ast.stmt, bound: str) -> ast.stmt:
    """Returns an import of one name only."""
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    alias = _alias(node, bound)
    if isinstance(node, ast.ImportFrom):
        return ast.ImportFrom(module=node.module, names=[alias], level=node.level)
    return ast.Import(names=[alias])


def _dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if not isinstance(node, ast.Attribute) or (path := _dotted(node.value)) is None:
        return None
    return [*path, node.attr]
