"""Shortens the source of a model to what one run uses. Imports no JAX."""

import ast
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from tekoa.estimator.eject import edits
from tekoa.estimator.eject.edits import Edit, Source

_INDENT = 4


def only_what_ran(text: str, counts: Mapping[int, int]) -> str:
    """Removes branches that were not taken, and methods that were not called.

    Args:
        text: The source.
        counts: How often each line ran.

    >>> lines = ['def f(x):', '    if x > 3:', '        x = 1', '    return x']
    >>> print(only_what_ran(chr(10).join(lines), {2: 1, 4: 1}))
    def f(x):
        return x
    """
    tree = ast.parse(text)
    removed: set[int] = set()
    shifts = dict.fromkeys(range(1, text.count("\n") + 2), 0)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for method in (m for m in node.body if isinstance(m, ast.FunctionDef)):
                is_used = method.name.startswith("__") or method.name in attributes
                if not is_used and not _did_run(method.body, counts):
                    removed |= {*range(edits.first_line(method), _last(method) + 1)}
    elifs: set[ast.stmt] = set()
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
        block = None if node in elifs else _branch_taken(node, counts, elifs)
        if block is None:
            continue
        inside = {*range(edits.first_line(block[0]), _last(block[-1]) + 1)} if block else set()
        removed |= {*range(node.lineno, _last(node) + 1)} - inside
        for line in inside:
            shifts[line] += _INDENT
    lines = text.split("\n")
    for block in edits.blocks(tree):
        first, last = edits.first_line(block[0]), _last(block[-1])
        if removed >= {*range(first, last + 1)} and first > 1 and first - 1 not in removed:
            removed.discard(first)
            lines[first - 1] = " " * block[0].col_offset + "pass"
    return "\n".join(line[shifts[i] :] for i, line in enumerate(lines, start=1) if i not in removed)


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _did_run(block: Collection[ast.stmt], counts: Mapping[int, int]) -> bool:
    return any(counts.get(n) for stmt in block for n in range(stmt.lineno, _last(stmt) + 1))


def _branch_taken(
    node: ast.If, counts: Mapping[int, int], elifs: set[ast.stmt]
) -> list[ast.stmt] | None:
    """Returns the only branch of a condition that ever ran, maybe an empty one, or None."""
    branches, rest = [node.body], node.orelse
    while len(rest) == 1 and isinstance(rest[0], ast.If) and rest[0].col_offset == node.col_offset:
        elifs.add(rest[0])
        branches.append(rest[0].body)
        rest = rest[0].orelse
    ran = [block for block in [*branches, rest] if _did_run(block, counts)]
    if not counts.get(node.lineno) or len(ran) > 1 or node.body[0].lineno == node.lineno:
        return None
    if not ran:
        return [] if not rest else None
    first = ran[0][0]
    is_simple = isinstance(first, (ast.Assign, ast.Expr, ast.Return, ast.AugAssign))
    is_counted = is_simple and first.lineno == _last(first)
    # Without `else`, the condition may have been false at times.
    if not rest and not (is_counted and counts[first.lineno] == counts[node.lineno]):
        return None
    has_text = any(
        isinstance(part, ast.Constant) and part.lineno != part.end_lineno
        for stmt in ran[0]
        for part in ast.walk(stmt)
    )
    return None if has_text else ran[0]


def short_docstrings(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Reduces docstrings to their first line, and removes those of methods."""
    methods = {
        method for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for method in node.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not ast.get_docstring(node):
            continue
        stmt = node.body[0]
        assert isinstance(stmt, ast.Expr)
        if node in methods and len(node.body) > 1:
            yield source.without(stmt)
        elif stmt.lineno != stmt.end_lineno:
            line = (ast.get_docstring(node) or "").split("\n")[0]
            yield source.replaced(stmt, f'"""{line}"""')


def no_annotations(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Removes the types of parameters, results and local variables; fields of classes stay."""
    for node in edits.functions(tree):
        for arg, default in _with_defaults(node.args):
            if arg.annotation is not None:
                end = source.end(arg) if default is None else source.start(default)
                text = arg.arg if default is None else f"{arg.arg}="
                yield Edit(source.start(arg), end, text)
        if node.returns is not None:
            end = source.end(node.returns)
            start = source.data.rindex(b"->", 0, source.start(node.returns))
            while source.data[start - 1 : start].isspace():
                start -= 1
            yield Edit(start, end)
        for stmt in ast.walk(node):
            if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
                if stmt.value is None:
                    yield source.without(stmt)
                else:
                    yield Edit(source.start(stmt), source.start(stmt.value), f"{stmt.target.id} = ")


def _with_defaults(args: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults]
    yield from zip(positional, defaults, strict=True)
    yield from zip(args.kwonlyargs, args.kw_defaults, strict=True)
    yield from ((arg, None) for arg in (args.vararg, args.kwarg) if arg is not None)


def without_effect(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Removes `x = x`, `del x`, assertions, and functions inside others that nothing reads."""
    for block in edits.blocks(tree):
        for stmt in block:
            is_same = (
                isinstance(stmt, ast.Assign)
                and len(stmt.targets) == 1
                and isinstance(stmt.targets[0], ast.Name)
                and isinstance(stmt.value, ast.Name)
                and stmt.targets[0].id == stmt.value.id
            )
            if (is_same or isinstance(stmt, (ast.Assert, ast.Delete))) and len(block) > 1:
                yield source.without(stmt)
    for node in edits.functions(tree):
        loaded = set(edits.loaded_names(node))
        for stmt in node.body:
            is_unused = isinstance(stmt, ast.FunctionDef) and stmt.name not in loaded
            if is_unused and len(node.body) > 1:
                yield source.without(stmt)


def never_reached(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Removes statements after `return` or `raise`."""
    for block in edits.blocks(tree):
        for before, stmt in itertools.pairwise(block):
            if isinstance(before, (ast.Return, ast.Raise)):
                yield source.without(stmt)


def without_metrics(name: str) -> edits.Rule:
    """Creates the rule that removes the metrics which a loss function returns with the loss."""

    def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
        for value in _pairs_returned(tree, name):
            yield source.replaced(value, source.text(value.elts[0]))

    return rule


def returns_metrics(text: str, name: str) -> bool:
    """Whether a function of this name has metrics that `without_metrics` removes."""
    return bool(_pairs_returned(ast.parse(text), name))


def _pairs_returned(tree: ast.Module, name: str) -> list[ast.Tuple]:
    """Returns the pairs of a loss and a dict that functions return, if they return only those."""
    pairs: list[ast.Tuple] = []
    for node in (node for node in edits.functions(tree) if node.name == name):
        values = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
        own = [v for v in values if isinstance(v, ast.Tuple) and len(v.elts) == 2]
        if len(own) == len(values) and all(isinstance(v.elts[1], ast.Dict) for v in own):
            pairs += own
    return pairs


def unused_parameters(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Removes parameters that a function does not read, with the arguments of its calls."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    for node in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        calls = [
            call
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            if call.func.id == node.name
        ]
        loaded = edits.loaded_names(node)
        is_only_called = len(calls) == sum(name.id == node.name for name in names)
        if not calls or not is_only_called or node.decorator_list or node.args.defaults:
            continue
        for i, arg in enumerate(node.args.args):
            is_passed = all(
                len(c.args) > i and not any(isinstance(a, ast.Starred) for a in c.args[: i + 1])
                for c in calls
            )
            has_others = node.args.vararg is not None or node.args.kwonlyargs
            if arg.arg not in loaded and is_passed and (i > 0 or not has_others):
                yield source.without_item([*node.args.args], i)
                yield from (source.without_item([*c.args, *c.keywords], i) for c in calls)
                return


def unused_items(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Writes `a, b = x, y` as `a = x` if nothing reads b and y computes nothing."""
    for node in edits.functions(tree):
        loaded = edits.loaded_names(node)
        for stmt in (stmt for stmt in node.body if isinstance(stmt, ast.Assign)):
            target, value = stmt.targets[0], stmt.value
            if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
                continue
            pairs = [*zip(target.elts, value.elts, strict=False)]
            used = [
                pair
                for pair in pairs
                if not isinstance(pair[0], ast.Name)
                or pair[0].id in loaded
                or any(isinstance(part, ast.Call) for part in ast.walk(pair[1]))
            ]
            if len(target.elts) == len(value.elts) and used and len(used) < len(pairs):
                sides = (", ".join(source.text(pair[i]) for pair in used) for i in (0, 1))
                yield source.replaced(stmt, " = ".join(sides))


def without_aliases(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Writes `a = f()` and `b = a` as `b = f()` if nothing else reads a."""
    for node in edits.functions(tree):
        loaded = edits.loaded_names(node)
        targets = {
            stmt.targets[0].id: stmt.targets[0]
            for stmt in node.body
            if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Name)
        }
        for stmt in (stmt for stmt in node.body if isinstance(stmt, ast.Assign)):
            value, target = stmt.value, stmt.targets[0]
            if not isinstance(value, ast.Name) or not isinstance(target, ast.Name):
                continue
            if value.id in targets and loaded.count(value.id) == 1:
                yield source.replaced(targets[value.id], target.id)
                yield source.without(stmt)
                return


def on_one_line(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Joins the lines of calls and signatures that fit on one line."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.Assign, ast.Return, ast.Expr, ast.Call)):
            continue
        last = source.end(node)
        if isinstance(node, ast.FunctionDef):
            inside = edits.arguments(node)
            if not inside:
                continue
            last = source.data.index(b"):", max(map(source.end, inside))) + 2
        text = source.data[source.start(node) : last].decode()
        joined = " ".join(text.split())
        joined = re.sub(r"([(\[{]) ", r"\1", re.sub(r",? ([)\]}])", r"\1", joined))
        rest = source.data[last:].split(b"\n", 1)[0]
        width = node.col_offset + len(joined) + len(rest)
        if "\n" in text and "#" not in text and '"""' not in text and width <= 100:
            yield Edit(source.start(node), last, joined)


def results_used(names: Collection[str]) -> edits.Rule:
    """Creates the rule that removes what does not contribute to the results of some functions.

    These are variables that nothing reads, and calls without a result, which check or log.
    """

    def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
        for node in (node for node in edits.functions(tree) if node.name in names):
            loaded = set(edits.loaded_names(node))
            for stmt in node.body:
                is_check = isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call)
                assigned = _names_of(stmt) if isinstance(stmt, ast.Assign) else set()
                if is_check or (assigned and not assigned & loaded):
                    yield source.without(stmt)

    return rule


def direct_returns(tree: ast.Module, source: Source) -> Iterator[Edit]:
    """Writes `x = y` and `return x` as `return y`."""
    for node in edits.functions(tree):
        if len(node.body) < 2:
            continue
        before, last = node.body[-2:]
        if (
            isinstance(last, ast.Return)
            and isinstance(last.value, ast.Name)
            and isinstance(before, ast.Assign)
            and _names_of(before) == {last.value.id}
            and isinstance(before.targets[0], ast.Name)
            and edits.loaded_names(node).count(last.value.id) == 1
        ):
            yield Edit(
                source.start(before), source.end(last), f"return {source.text(before.value)}"
            )


def _names_of(stmt: ast.Assign) -> set[str]:
    """Returns the variables that a statement assigns; nothing if it assigns anything else."""
    parts = [part for target in stmt.targets for part in ast.walk(target)]
    if not all(isinstance(part, (ast.Name, ast.Tuple, ast.expr_context)) for part in parts):
        return set()
    return {part.id for part in parts if isinstance(part, ast.Name)}


def first_argument(is_identity: Callable[[ast.expr], bool]) -> edits.Rule:
    """Creates the rule that replaces calls of some functions by their first argument."""

    def rule(tree: ast.Module, source: Source) -> Iterator[Edit]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and is_identity(node.func):
                yield source.replaced(node, source.text(node.args[0]))

    return rule
