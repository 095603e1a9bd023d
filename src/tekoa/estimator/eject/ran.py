"""Which lines of a model file run in training, and its text without the others."""

import ast
import collections
import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any

# Stands for a line that is left out, so that the others keep their numbers.
GONE = "#-"


# The numbers of lines that ran, by the first line of their function.
Lines = Mapping[int, Collection[int]]


@contextlib.contextmanager
def recorded_lines(is_own: Callable[[str], bool]) -> Iterator[Mapping[str, Lines]]:
    """Records, by file, the lines that run inside a `with` block.

    Args:
        is_own: Whether a file, of which the path is given, is recorded.

    >>> import textwrap
    >>> with recorded_lines(lambda path: path.endswith('textwrap.py')) as ran:
    ...     _ = textwrap.dedent('  a')
    >>> any(len(lines) > 1 for lines in ran[textwrap.__file__].values())
    True
    """
    ran: Any = collections.defaultdict(lambda: collections.defaultdict(set))

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        del event, value
        code = frame.f_code
        if not is_own(code.co_filename):
            return None
        ran[code.co_filename][code.co_firstlineno].add(frame.f_lineno)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(previous)


def only_what_ran(text: str, ran: Lines) -> str:
    r"""Leaves out the statements that did not run, in functions that did.

    Where only one branch of an `if` ran, it takes the place of the `if`. Lines keep their numbers.

    >>> text = 'def f(x, y=None):\n    if y is None:\n        return x\n    return x + y\n'
    >>> only_what_ran(text, {1: {2, 3}})
    'def f(x, y=None):\n#-\n    return x\n#-'
    """
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min(part.lineno for part in [node, *node.decorator_list])
            if len(ran.get(first, ())) > 1:  # Besides the line of the call.
                _visit(node.body, lines, ran[first])
    return "\n".join(lines)


def _visit(statements: list[ast.stmt], lines: list[str], ran: Collection[int]) -> None:
    """Changes the lines of statements, of which the first ran."""
    for i, node in enumerate(statements):
        if not (_is_text(node) or _did_run(node, ran)):  # As one before it has returned.
            return _leave_out(lines, node.lineno, _end(statements[-1]), with_comment=True)
        if isinstance(node, ast.If):
            rest = statements[i + 1 :]
            _visit_if(node, lines, ran, is_last=bool(rest) and not _did_run(rest[0], ran))
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, [])
                if any(_did_run(part, ran) for part in body):
                    _visit(body, lines, ran)
    return None


def _visit_if(node: ast.If, lines: list[str], ran: Collection[int], *, is_last: bool) -> None:
    """Changes the lines of an `if`; `is_last` says whether nothing ran after it."""
    in_body, in_else = (any(_did_run(part, ran) for part in b) for b in (node.body, node.orelse))
    for part, did_run in ((node.body, in_body), (node.orelse, in_else)):
        if did_run:
            _visit(part, lines, ran)
    if not (in_body or in_else):
        _leave_out(lines, node.lineno, _end(node), with_comment=True)
    elif in_body != in_else and (in_else or node.orelse or is_last):
        branch = node.body if in_body else node.orelse
        first = _end(node.test) + 1 if in_body else branch[0].lineno
        shift = branch[0].col_offset - node.col_offset
        for i in range(first - 1, _end(branch[-1])):
            lines[i] = lines[i] if lines[i] == GONE else lines[i][shift:]
        if not shift and lines[first - 1].lstrip().startswith("elif"):
            lines[first - 1] = lines[first - 1].replace("elif", "if", 1)
        _leave_out(lines, node.lineno, first - 1)
        _leave_out(lines, _end(branch[-1]) + 1, _end(node))


def _leave_out(lines: list[str], first: int, last: int, *, with_comment: bool = False) -> None:
    while with_comment and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    lines[first - 1 : last] = [GONE] * (last - first + 1)


def _did_run(node: ast.AST, ran: Collection[int]) -> bool:
    return any(i in ran for i in range(node.lineno, _end(node) + 1))  # type: ignore[attr-defined]


def _end(node: ast.AST) -> int:
    return node.end_lineno  # type: ignore[attr-defined]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
