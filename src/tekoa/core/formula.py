"""Reads arithmetic formulas such as 'sqrt(1 / prod(SHAPE[:-1]))', and nothing else.

A formula comes from a config or a file, so it is hostile until read. The reader below
knows numbers, tuples, `SHAPE` and the operators and functions of `arithmetic`; it never
looks a name up anywhere else.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from tekoa.core import arithmetic
from tekoa.core.arithmetic import Value

MAX_LENGTH = 300
MAX_DEPTH = 24

Shape = tuple[int, ...]


class FormulaError(ValueError):
    """A formula was refused; `column` (from 1) is where."""

    def __init__(self, formula: str, column: int, problem: str):
        shown = formula if len(formula) <= 60 else formula[:57] + "..."
        known = ", ".join(sorted(arithmetic.FUNCTIONS))
        super().__init__(
            f"Cannot read formula {shown!r} at column {column}: {problem} A formula has numbers, "
            f"tuples, + - * / // % **, SHAPE and the functions {known}."
        )
        self.column = column


def evaluate(formula: str, shape: Sequence[int] = ()) -> float | int | Shape:
    """Computes a formula, in which `SHAPE` is the variable's shape.

    Args:
        formula: ASCII text of at most 300 characters.
        shape: What `SHAPE` stands for.

    Returns:
        A finite number, or a tuple of ints.

    Raises:
        FormulaError: If the text is anything but such a formula; it has the column.

    >>> evaluate('sqrt(2 / prod(SHAPE[:-1]))', (3, 3, 2, 64))
    0.3333333333333333
    >>> evaluate('(1,) * (len(SHAPE) - 1) + SHAPE[-1:]', (3, 3, 2, 64))
    (1, 1, 1, 64)
    """
    if not isinstance(formula, str):
        raise TypeError(f"A formula must be a str, got {formula!r}.")
    if len(formula) > MAX_LENGTH:
        raise FormulaError(formula, MAX_LENGTH + 1, f"it is longer than {MAX_LENGTH} characters.")
    return _Reader(formula, tuple(map(operator.index, shape))).read()


_TOKEN = re.compile(
    r"[ \t]*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<symbol>\*\*|//|[-+*/%(),\[\]:])"
    r"|(?P<end>\Z))"
)


class _Reader:
    """A recursive descent parser that computes as it reads."""

    def __init__(self, text: str, shape: Shape):
        self._text, self._shape = text, shape
        self._depth = 0
        self._tokens = self._tokenize()
        self._at = 0

    def read(self) -> float | int | Shape:
        value = self._tuple_or_value("")
        if self._peek():
            self._fail(f"unexpected {self._peek()!r}.")
        if isinstance(value, tuple) and not all(isinstance(x, int) for x in value):
            self._fail("the result is a tuple of other things than whole numbers.")
        return value

    # -- tokens

    def _tokenize(self) -> list[tuple[str, str, int]]:
        tokens, at = [], 0
        while True:
            found = _TOKEN.match(self._text, at)
            if found is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip(" \t"))
                raise FormulaError(self._text, at + 1, f"{self._text[at]!r} is not allowed.")
            kind = found.lastgroup or "end"
            tokens.append((kind, found.group(kind), found.start(kind) + 1))
            if kind == "end":
                return tokens
            at = found.end()

    def _peek(self) -> str:
        return self._tokens[self._at][1]

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _accept(self, *symbols: str) -> str | None:
        return self._take()[1] if self._peek() in symbols else None

    def _expect(self, symbol: str) -> None:
        if not self._accept(symbol):
            self._fail(f"expected {symbol!r}, found {self._peek() or 'the end'!r}.")

    def _fail(self, problem: str, column: int | None = None) -> NoReturn:
        raise FormulaError(self._text, column or self._tokens[self._at][2], problem)

    # -- grammar, loosest binding first

    def _tuple_or_value(self, closing: str) -> Value:
        """Reads `a` as a value and `a, b` or `a,` as a tuple, up to `closing`."""
        if closing and self._peek() == closing:
            return ()
        column = self._tokens[self._at][2]
        items, is_tuple = [self._sum()], False
        while self._accept(","):
            is_tuple = True
            if self._peek() == closing:
                break
            items.append(self._sum())
        if not is_tuple:
            return items[0]
        if any(isinstance(item, tuple) for item in items):
            self._fail("a tuple inside a tuple is not allowed.", column)
        return self._compute(tuple, [items], column)

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"it is nested deeper than {MAX_DEPTH} levels.")
        value = self._product()
        while symbol := self._accept("+", "-"):
            column = self._tokens[self._at - 1][2]
            value = self._apply(symbol, column, value, self._product())
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._signed()
        while symbol := self._accept("*", "/", "//", "%"):
            column = self._tokens[self._at - 1][2]
            value = self._apply(symbol, column, value, self._signed())
        return value

    def _signed(self) -> Value:
        signs = []
        while symbol := self._accept("-", "+"):
            signs.append(symbol)
            if len(signs) > MAX_DEPTH:
                self._fail(f"more than {MAX_DEPTH} signs in a row.")
        value = self._power()
        if signs and isinstance(value, tuple):
            self._fail("a tuple has no sign.")
        return -value if signs.count("-") % 2 else value

    def _power(self) -> Value:
        base = self._indexed()
        if self._accept("**"):
            column = self._tokens[self._at - 1][2]
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self._fail(f"it is nested deeper than {MAX_DEPTH} levels.")
            base = self._apply("**", column, base, self._signed())
            self._depth -= 1
        return base

    def _indexed(self) -> Value:
        value = self._atom()
        while self._peek() == "[":
            column = self._take()[2]
            index = self._index()
            self._expect("]")
            if not isinstance(value, tuple):
                self._fail("only SHAPE and tuples can be indexed.", column)
            try:
                value = value[index]
            except (IndexError, TypeError, ValueError):
                self._fail(f"no such entry in a tuple of length {len(value)}.", column)
        return value

    def _index(self) -> int | slice:
        parts: list[int | None] = [None]
        while True:
            if self._peek() not in (":", "]"):
                column = self._tokens[self._at][2]
                bound = self._sum()
                if not isinstance(bound, int):
                    self._fail("an index must be a whole number.", column)
                parts[-1] = bound
            if len(parts) == 3 or not self._accept(":"):
                break
            parts.append(None)
        if len(parts) > 1:
            return slice(*parts)
        if parts[0] is None:
            self._fail("an index is missing.")
        return parts[0]

    def _atom(self) -> Value:
        kind, text, column = self._take()
        if kind == "number":
            if text.isdigit() and text != "0" and text[0] == "0":
                self._fail("a whole number begins with 0.", column)
            return self._compute(int if text.isdigit() else float, [text], column)
        if text == "SHAPE":
            return self._shape
        if text == "(":
            value = self._tuple_or_value(")")
            self._expect(")")
            return value
        if kind == "name":
            return self._call(text, column)
        self._at -= kind != "end"
        return self._fail(f"expected a value, found {text or 'the end'!r}.", column)

    def _call(self, name: str, column: int) -> Value:
        function = arithmetic.FUNCTIONS.get(name)
        if function is None:
            self._fail(f"{name!r} is not a known name.", column)
        self._expect("(")
        arguments: list[Value] = []
        while self._peek() != ")":
            arguments.append(self._sum())
            if not self._accept(","):
                break
        self._expect(")")
        return self._compute(function, arguments, column)

    # -- arithmetic

    def _apply(self, symbol: str, column: int, left: Value, right: Value) -> Value:
        return self._compute(arithmetic.OPERATORS[symbol], [left, right], column)

    def _compute(
        self, function: Callable[..., Value], arguments: list[Value], column: int
    ) -> Value:
        try:
            return arithmetic.checked(function(*arguments))
        except (ArithmeticError, ValueError, TypeError) as error:
            return self._fail(f"{error}.", column)
