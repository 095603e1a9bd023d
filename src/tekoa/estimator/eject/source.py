"""The part of a model file that its training needs, without Tekoa. Imports no JAX."""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekoa.estimator.cli.flags import UsageError

# What stands for the names of Tekoa in the ejected file; "" if the file defines it anyway.
_STAND_INS = {
    "Experiment": "Experiment = types.SimpleNamespace",
    "DataFacts": "DataFacts = types.SimpleNamespace",
    "UsageError": "UsageError = ValueError",
    "amos": "",
    "params_fn_from_assign_map": "",
}
# The arguments of `pieces.AMOS`.
_AMOS_ARGUMENTS = {"learning_rate", "eta_fn", "shape_fn", "beta", "clip_value"}
# Parts of a model file that the ejected file replaces.
_REPLACED = ("get_config", "open_data", "DEFAULTS", "ALWAYS")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The code of a model that goes into the ejected file.

    Attributes:
        imports: Lines that import other packages.
        stand_ins: Lines that replace names of Tekoa.
        code: The rest.
        uses_amos: Whether it trains with Amos.
    """

    imports: tuple[str, ...]
    stand_ins: tuple[str, ...]
    code: str
    uses_amos: bool


def read_model(text: str, file: str) -> ModelSource:
    """Selects what `experiment` needs from the text of a model file.

    Args:
        text: The text.
        file: The name of the file, for errors.

    Raises:
        UsageError: If it uses something of Tekoa that has no plain equivalent.
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    segments = dict(_segments(tree, lines))
    definitions = {name: node for node in segments for name in _bound_names(node)}
    needed = _reachable("experiment", definitions)
    nodes = [node for node in segments if node in needed]
    used = {name for node in nodes for name in _names(node)}
    imports, own = [], {}
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if bound not in used or module == "__future__":
                continue
            if (module or alias.name).partition(".")[0] == "tekoa":
                own[bound] = alias.name
            else:
                imports.append(ast.unparse(_alone(node, alias)))
    code = "\n\n\n".join(segments[node] for node in nodes)
    names = _tekoa_names(nodes, own, file)
    if "amos" in names:
        _check_amos(nodes, own, file)
    code = re.sub(r"\btekoa\.(?=amos\b)", "", code)
    return ModelSource(
        imports=tuple(dict.fromkeys(imports)),
        stand_ins=tuple(_STAND_INS[name] for name in sorted(names) if _STAND_INS[name]),
        code=code,
        uses_amos="amos" in names,
    )


def _tekoa_names(nodes: Sequence[ast.stmt], own: Mapping[str, str], file: str) -> set[str]:
    """Returns the names of Tekoa that are used, by their names there."""
    names = set()
    for node in nodes:
        attributes = {
            id(part.value): part.attr
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
        }
        for part in ast.walk(node):
            if not isinstance(part, ast.Name) or part.id not in own:
                continue
            name = own[part.id]
            if name == "tekoa":
                name = attributes.get(id(part), name)
            if name not in _STAND_INS:
                raise UsageError(
                    f"{file}, line {part.lineno}: {name!r} of Tekoa has no plain equivalent, so "
                    "this run cannot be ejected."
                )
            names.add(name)
    return names


def _check_amos(nodes: Sequence[ast.stmt], own: Mapping[str, str], file: str) -> None:
    """Checks that Amos is called with the arguments that the ejected form of it has."""
    for call in (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else _name_of(call.func)
        if own.get(name, name) != "amos":
            continue
        if others := sorted({str(keyword.arg) for keyword in call.keywords} - _AMOS_ARGUMENTS):
            raise UsageError(
                f"{file}, line {call.lineno}: Amos with {', '.join(others)} has no plain "
                "equivalent, so this run cannot be ejected."
            )


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _segments(tree: ast.Module, lines: Sequence[str]) -> Iterator[tuple[ast.stmt, str]]:
    """Yields the definitions of a file with their text, comments above included."""
    end = 0
    for node in tree.body:
        start, end = end, node.end_lineno or node.lineno
        names = _bound_names(node)
        if names and not isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, "\n".join(lines[start:end]).strip("\n")


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [
            part.id for t in node.targets for part in ast.walk(t) if isinstance(part, ast.Name)
        ]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    else:
        names = []
    return [] if set(names) & set(_REPLACED) else names


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _reachable(name: str, definitions: Mapping[str, Any]) -> set[ast.stmt]:
    """Returns the definitions that one of them needs, directly or not."""
    todo, needed = [name], set()
    while todo:
        node = definitions.get(todo.pop())
        if node is not None and node not in needed:
            needed.add(node)
            todo += _names(node)
    return needed


def _alone(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    """Returns an import of one name only."""
    if isinstance(node, ast.ImportFrom):
        return ast.ImportFrom(module=node.module, names=[alias], level=node.level)
    return ast.Import(names=[alias])
