"""Edits of Python source by its syntax tree that keep comments and layout. Imports no JAX."""

import ast
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# `rule(tree, source)` yields edits of the source that the tree was parsed from.
Rule = Callable[[ast.Module, "Source"], Iterable["Edit"]]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces the bytes from `start` to `end` by a text."""

    start: int
    end: int
    text: str = ""


class Source:
    """The text of a file, with the positions of its lines."""

    def __init__(self, text: str):
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: Any) -> int:
        """Returns where a node begins."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        """Returns where a node ends."""
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        """Returns the text of a node."""
        return self.data[self.start(node) : self.end(node)].decode()

    def lines(self, first: int, last: int) -> str:
        """Returns the lines from `first` to `last`, counted from 1."""
        return self.data[self.starts[first - 1] : self.starts[last]].decode()

    def replaced(self, node: Any, text: str) -> Edit:
        """Returns the edit that replaces a node."""
        return Edit(self.start(node), self.end(node), text)

    def without(self, node: ast.stmt) -> Edit:
        """Returns the edit that removes a statement, with its lines and the comments above."""
        first, last = first_line(node), node.end_lineno or node.lineno
        while first > 1 and self.lines(first - 1, first - 1).strip().startswith("#"):
            first -= 1
        return Edit(self.starts[first - 1], self.starts[last])

    def without_item(self, items: list[Any], i: int) -> Edit:
        """Returns the edit that removes one of several items, and the comma beside it."""
        if i > 0:
            return Edit(self.end(items[i - 1]), self.end(items[i]))
        return Edit(self.start(items[0]), self.start(items[1]) if items[1:] else self.end(items[0]))


def apply(text: str, *rules: Rule) -> str:
    """Applies rules until none of them finds anything to edit.

    >>> def constants(tree, source):
    ...     for node in ast.walk(tree):
    ...         if isinstance(node, ast.Name):
    ...             yield source.replaced(node, '1')
    >>> apply('x + [x]  # Comment.', constants)
    '1 + [1]  # Comment.'
    """
    for _ in range(1000):
        source, tree = Source(text), ast.parse(text)
        edits = next(filter(None, ([*_outermost(rule(tree, source))] for rule in rules)), None)
        if edits is None:
            return text
        data = source.data
        for edit in reversed(edits):
            data = data[: edit.start] + edit.text.encode() + data[edit.end :]
        text = data.decode()
    raise AssertionError("The rules never end.")


def _outermost(edits: Iterable[Edit]) -> Iterator[Edit]:
    """Yields edits in order, without those inside or overlapping an earlier or larger one."""
    end = -1
    for edit in sorted(set(edits), key=lambda edit: (edit.start, -edit.end)):
        if edit.start >= end:
            yield edit
            end = edit.end


def first_line(node: ast.stmt) -> int:
    """Returns the first line of a statement, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yields all functions with a name, those inside others too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node


def arguments(node: Function) -> list[ast.arg]:
    """Returns all parameters of a function."""
    a = node.args
    others = [arg for arg in (a.vararg, a.kwarg) if arg is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *others]


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields every list of statements."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def loaded_names(tree: ast.AST) -> list[str]:
    """Returns the names that are read, as often as they are."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return [node.id for node in nodes if isinstance(node.ctx, ast.Load)]
