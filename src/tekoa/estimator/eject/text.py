"""The text of definitions: where they are in a file, what they use, and edits of it."""

import ast
import io
import pathlib
import re
import symtable
import textwrap
import tokenize
import types
from collections.abc import Iterable, Iterator

from tekoa.estimator.eject.ran import GONE

# Of a line of an ejected file.
WIDTH = 100

# A node, and the text that replaces it.
Edit = tuple[ast.expr | ast.stmt, str]


def read(module: types.ModuleType) -> str:
    """Returns the source of a module."""
    return pathlib.Path(module.__file__ or "").read_text()


def bound_names(node: ast.stmt) -> set[str]:
    """Returns the names that a statement binds, those of its own scope only.

    >>> sorted(bound_names(ast.parse('a, (b, c.d) = 1, f').body[0]))
    ['a', 'b']
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {part.id for part in parts if isinstance(part.ctx, ast.Store)}


def definition(text: str, name: str) -> str | None:
    """Returns the statement of a file that defines a name, with the comments above it, or None."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if name in bound_names(node):
            decorators = getattr(node, "decorator_list", [])
            start = min(part.lineno for part in [node, *decorators]) - 1
            while start and lines[start - 1].startswith("#"):
                start -= 1
            return "\n".join(lines[start : node.end_lineno])
    return None


def is_empty(text: str) -> bool:
    r"""Whether a definition is a function without statements.

    >>> is_empty('def f(x):\n    \'Checks x.\''), is_empty('def f(x):\n    return x')
    (True, False)
    """
    (node,) = ast.parse(text).body
    return isinstance(node, ast.FunctionDef) and all(
        isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in node.body
    )


def imports(text: str) -> dict[str, ast.Import | ast.ImportFrom]:
    """Returns, by name, the imports of a file, each of one name.

    >>> {name: ast.unparse(node) for name, node in imports('from a import b, c as d').items()}
    {'b': 'from a import b', 'd': 'from a import c as d'}
    """
    nodes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                nodes[alias.asname or alias.name.partition(".")[0]] = ast.Import([alias])
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                one = ast.ImportFrom(node.module, [alias], node.level)
                nodes[alias.asname or alias.name] = one
    return nodes


def global_names(text: str) -> set[str]:
    r"""Returns the names that code reads and does not bind.

    >>> sorted(global_names('def f(x):\n    y = g(x)\n    return y + ONE'))
    ['ONE', 'g']
    """

    def visit(table: symtable.SymbolTable) -> Iterator[str]:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            is_own = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if symbol.is_referenced() and (not is_own if is_module else symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from visit(child)

    table = symtable.symtable(text, "<code>", "exec")
    return {*visit(table)} - {name for node in ast.parse(text).body for name in bound_names(node)}


def chains(text: str) -> Iterator[list[ast.expr]]:
    """Yields `a`, `a.b`, `a.b.c` for each longest such expression that code reads.

    >>> [[ast.unparse(node) for node in chain] for chain in chains('f(a.b.c)')]
    [['f'], ['a', 'a.b', 'a.b.c']]
    """

    def visit(node: ast.AST) -> Iterator[list[ast.expr]]:
        chain: list[ast.expr] = []
        part: ast.AST = node
        while is_access(part):
            chain.append(part)  # type: ignore[arg-type]
            part = part.value  # type: ignore[attr-defined]
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield [part, *reversed(chain)]
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(text))


def is_access(node: ast.AST) -> bool:
    """Whether code is `x.name` or `x["name"]`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Returns code with some nodes replaced.

    >>> edited('f(a, b)', [(chain[0], 'x') for chain in chains('f(a, b)')])
    'x(x, x)'
    """
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = text.encode()
    spans = [
        (starts[n.lineno - 1] + n.col_offset, starts[n.end_lineno - 1] + n.end_col_offset, new)
        for n, new in edits
        if n.end_lineno is not None and n.end_col_offset is not None
    ]
    for start, end, new in sorted(spans, key=lambda span: span[:2], reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def without_types(text: str) -> str:
    r"""Removes the types of parameters, results and local variables; fields of classes stay.

    >>> without_types('def f(x: int, *, y: str="a") -> int:\n    z: int = x\n    return z')
    'def f(x, *, y="a"):\n    z = x\n    return z'
    """
    edits: list[Edit] = []
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        end = _end_of_signature(text, function)
        span = _span((function.lineno, function.col_offset), end)
        edits.append((span, _signature(function)))
    tree = ast.parse(text)
    fields = {id(f) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for f in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is not None and id(node) not in fields:
            start = node.target.end_lineno or 0, node.target.end_col_offset or 0
            edits.append((_span(start, (node.value.lineno, node.value.col_offset)), " = "))
    return edited(text, edits)


def _signature(function: ast.FunctionDef) -> str:
    """Returns `def name(...):` without types."""
    arguments = function.args
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    words, indent = ast.unparse(arguments).replace("'", '"'), " " * function.col_offset
    line = f"def {function.name}({words}):"
    is_short = len(indent + line) <= WIDTH
    return line if is_short else f"def {function.name}(\n{indent}    {words}\n{indent}):"


def _end_of_signature(text: str, function: ast.FunctionDef) -> tuple[int, int]:
    """Returns line and column after the colon of a function."""
    depth, start = 0, (function.lineno, function.col_offset)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start >= start and token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and not depth:
                line, column = token.end
                return line, len(token.line.splitlines()[-1][:column].encode())
    raise AssertionError(function.name)


def _span(start: tuple[int, int], end: tuple[int, int]) -> ast.expr:
    """Returns a node from one position to another."""
    names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return ast.Constant(None, **dict(zip(names, (*start, *end), strict=True)))


def joined(text: str) -> str:
    r"""Puts each simple statement on one line where it fits and has no comment.

    >>> joined('x = f(\n    1,\n    2,\n)')
    'x = f(1, 2)'
    """
    edits: list[Edit] = []
    simple = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return)
    for node in [node for node in ast.walk(ast.parse(text)) if isinstance(node, simple)]:
        source = text.splitlines()[node.lineno - 1 : node.end_lineno]
        if len(source) > 1 and not any("#" in line or '"""' in line for line in source):
            line = re.sub(r"(?<=[(\[{]) |,? (?=[)\]}])", "", " ".join(map(str.strip, source)))
            is_short = len(line) + node.col_offset <= WIDTH
            if is_short and ast.unparse(ast.parse(line)) == ast.unparse(node):
                edits.append((node, line))
    return edited(text, edits)


def wrapped(text: str) -> str:
    r"""Gives the arguments of a statement's call lines of their own where one line is too long.

    >>> print(wrapped(f'x = function({"a" * 60}, b={"c" * 24})'))
    x = function(
        aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, b=cccccccccccccccccccccccc
    )
    """
    edits: list[Edit] = []
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        call = getattr(node, "value", None)
        is_simple = isinstance(node, (ast.Expr, ast.Assign, ast.Return))
        if not is_simple or not isinstance(call, ast.Call) or node.lineno != node.end_lineno:
            continue
        if len(lines[node.lineno - 1]) <= WIDTH:
            continue
        arguments = [*call.args, *call.keywords]
        arguments.sort(key=lambda part: part.col_offset)
        words = [ast.get_source_segment(text, part) or "" for part in arguments]
        indent = " " * node.col_offset
        inner = f"{indent}    {', '.join(words)}"
        if len(inner) > WIDTH:
            inner = "\n".join(f"{indent}    {word}," for word in words)
        new = f"{ast.get_source_segment(text, call.func)}(\n{inner}\n{indent})"
        if ast.unparse(ast.parse(new)) == ast.unparse(call):
            edits.append((call, new))
    return edited(text, edits)


def short_docstrings(text: str) -> str:
    """Reduces docstrings to their first line, and removes those of methods."""
    edits: list[Edit] = []
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {id(node) for owner in classes for node in owner.body}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        line = "" if id(node) in methods else f'"""{docstring.splitlines()[0]}"""'
        edits.append((node.body[0], line))
    return re.sub(r":\n +\n", ":\n", edited(text, edits))


def without_calls(text: str, name: str) -> str:
    r"""Replaces each call of a function by its first argument; `x = f(x)` is left out.

    >>> without_calls('y = f(x, 1)\ny = f(y, 2)', 'f')
    'y = x\n#-'
    """
    for node in ast.walk(ast.parse(text)):
        call = node.value if isinstance(node, ast.Assign) else node
        if isinstance(call, ast.Call) and ast.unparse(call.func) == name:
            new = ast.get_source_segment(text, call.args[0]) or ""
            if isinstance(node, ast.Assign) and new == ast.unparse(node.targets[0]):
                return without_calls(edited(text, [(node, GONE)]), name)
            return without_calls(edited(text, [(call, new)]), name)
    return text


def lambda_of(text: str, code: types.CodeType) -> ast.Lambda:
    """Returns the lambda of a file that a code object belongs to.

    >>> f = lambda x: x + 1
    >>> ast.unparse(lambda_of('f = lambda x: x + 1', f.__code__))
    'lambda x: x + 1'
    """
    places = [p for p in code.co_positions() if p[0] and p[2] is not None and p[3]]
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]

    def holds(body: ast.expr) -> bool:
        first, last = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        return all(first <= (p[0], p[2]) and (p[1], p[3]) <= last for p in places)

    nodes = [node for node in nodes if node.lineno == code.co_firstlineno]
    return nodes[0] if len(nodes) == 1 else next(node for node in nodes if holds(node.body))


def dedented(text: str, node: ast.stmt) -> str:
    """Returns a statement of a file without its indentation."""
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))
