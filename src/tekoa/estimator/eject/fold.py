"""Replaces settings and facts about the data by their values. Imports no JAX."""

import ast
import builtins
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from tekoa.estimator.eject import edits
from tekoa.estimator.eject.edits import Edit, Source

_BUILTINS = {
    name: getattr(builtins, name)
    for name in ("abs", "bool", "float", "int", "len", "max", "min", "round", "str", "sum", "tuple")
}
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def is_literal(value: Any) -> bool:
    """Whether the text of a value, as Python prints it, is code for it.

    >>> is_literal((1, 'a', None)), is_literal(float('nan')), is_literal({1})
    (True, False, False)
    """
    if type(value) in (tuple, list):
        return all(map(is_literal, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def with_values(variables: Mapping[str, Mapping[str, Any]], roots: tuple[Any, ...]) -> edits.Rule:
    """Creates the rule that writes values in place of expressions of settings.

    Args:
        variables: The variables of functions when they ended, by the name of the function.
        roots: The objects that hold settings and facts.
    """

    def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
        for node in edits.functions(tree):
            if node.name in variables:
                yield from _folded(node, source, variables[node.name], roots)

    return rule


def _folded(
    function: ast.FunctionDef, source: Source, variables: Mapping[str, Any], roots: tuple[Any, ...]
) -> Iterator[Edit]:
    shadowed = {
        arg.arg
        for node in ast.walk(function)
        if node is not function and isinstance(node, (ast.FunctionDef, ast.Lambda))
        for arg in edits.arguments(node)
    }
    assigned = [
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    known = {
        name: value
        for name, value in variables.items()
        if name not in shadowed
        and (
            any(value is root for root in roots)
            or (assigned.count(name) == 1 and is_literal(value))
        )
    }
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.keyword) and node.arg is None:
            items = _value(node.value, known)
            if hasattr(items, "items") and all(is_literal(v) for _, v in items.items()):
                words = ", ".join(f"{name}={value!r}" for name, value in items.items())
                yield source.replaced(node, words)
                continue
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            value = _value(node, known)
            if value is not _UNKNOWN and is_literal(value):
                yield source.replaced(node, repr(value))
                continue
        if not isinstance(node, ast.JoinedStr):
            todo += ast.iter_child_nodes(node)


_UNKNOWN: Any = object()


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of known variables, or `_UNKNOWN`."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    if not names & known.keys():
        return _UNKNOWN
    try:
        return _compute(node, {**_BUILTINS, "math": math, **known})
    except Exception:  # The expression is left as it is.
        return _UNKNOWN


def _compute(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Computes an expression of settings; anything else raises."""

    def value(part: ast.expr) -> Any:
        return _compute(part, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.Attribute():
            return getattr(value(node.value), node.attr)
        case ast.Subscript():
            return value(node.value)[value(node.slice)]
        case ast.Tuple():
            return tuple(map(value, node.elts))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](value(node.operand))
        case ast.Compare(ops=[op], comparators=[right]):
            return _OPERATORS[type(op)](value(node.left), value(right))
        case ast.IfExp():
            return value(node.body if value(node.test) else node.orelse)
        case ast.BoolOp(values=[left, right]):
            first = value(left)
            return first if bool(first) == isinstance(node.op, ast.Or) else value(right)
        case ast.Call(keywords=[]):
            function = value(node.func)
            if function in _BUILTINS.values() or getattr(function, "__module__", "") == "math":
                return function(*map(value, node.args))
    raise ValueError(ast.dump(node))


def without_parameters(
    variables: Mapping[str, Mapping[str, Any]], roots: tuple[Any, ...]
) -> edits.Rule:
    """Creates the rule that removes parameters that held settings and are no longer read."""

    def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for node in edits.functions(tree):
            values = variables.get(node.name, {})
            loaded, parameters = set(edits.loaded_names(node)), node.args.args
            own_calls = [
                c for c in calls if isinstance(c.func, ast.Name) and c.func.id == node.name
            ]
            for i, arg in enumerate(parameters):
                is_setting = any(values.get(arg.arg) is root for root in roots)
                is_passed = all(
                    len(call.args) > i and not any(isinstance(a, ast.Starred) for a in call.args)
                    for call in own_calls
                )
                if is_setting and arg.arg not in loaded and is_passed and not node.args.defaults:
                    yield source.without_item([*parameters], i)
                    yield from (source.without_item([*c.args, *c.keywords], i) for c in own_calls)
                    return

    return rule
