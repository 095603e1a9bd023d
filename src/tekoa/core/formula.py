"""Reads arithmetic formulas such as 'sqrt(1 / prod(SHAPE[:-1]))', and nothing else.

A formula comes from a config or a file, so it is hostile until read. The reader below
knows numbers, tuples, arithmetic, `SHAPE` and the functions of one table; it never
looks a name up anywhere else and bounds the work before doing it.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_LENGTH = 300
MAX_DEPTH = 24
MAX_MAGNITUDE = 2**63
MAX_TUPLE = 64

Shape = tuple[int, ...]
Value = Any  # int, float or a flat tuple of those, checked by the evaluator.


class FormulaError(ValueError):
    """A formula was refused; `column` (from 1) is where."""

    def __init__(self, formula: str, column: int, problem: str):
        shown = formula if len(formula) <= 60 else formula[:57] + "..."
        super().__init__(
            f"Cannot read formula {shown!r} at column {column}: {problem} A formula has numbers, "
            f"tuples, + - * / // % **, SHAPE and the functions {', '.join(sorted(FUNCTIONS))}."
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
    return _Reader(formula, tuple(int(n) for n in shape)).read()


_TOKEN = re.compile(
    r"[ \t]*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<symbol>\*\*|//|[-+*/%(),\[\]:])"
    r"|(?P<end>$))"
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

    def _fail(self, problem: str, column: int | None = None) -> None:
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
        return self._checked(tuple(items), column)

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"it is nested deeper than {MAX_DEPTH} levels.")
        value = self._product()
        while symbol := self._accept("+", "-"):
            value = self._apply(symbol, value, self._product())
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._signed()
        while symbol := self._accept("*", "/", "//", "%"):
            value = self._apply(symbol, value, self._signed())
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
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self._fail(f"it is nested deeper than {MAX_DEPTH} levels.")
            base = self._apply("**", base, self._signed())
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
        return parts[0]  # pyright: ignore[reportReturnType]

    def _atom(self) -> Value:
        kind, text, column = self._take()
        if kind == "number":
            is_whole = text.isdigit()
            return self._checked(int(text[:20]) if is_whole else float(text), column)
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
        function = FUNCTIONS.get(name)
        if function is None:
            self._fail(f"{name!r} is not a known name.", column)
        self._expect("(")
        arguments: list[Value] = []
        while self._peek() != ")":
            arguments.append(self._sum())
            if not self._accept(","):
                break
        self._expect(")")
        return self._compute(function, arguments, column)  # pyright: ignore[reportArgumentType]

    # -- arithmetic, bounded before it is done

    def _apply(self, symbol: str, left: Value, right: Value) -> Value:
        column = self._tokens[self._at][2]
        return self._compute(_OPERATORS[symbol], [left, right], column)

    def _compute(self, function: Callable[..., Value], arguments: list[Value], column: int):
        try:
            value = function(*arguments)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise FormulaError(self._text, column, f"{error}.") from None
        return self._checked(value, column)

    def _checked(self, value: Value, column: int) -> Value:
        if isinstance(value, tuple):
            if len(value) > MAX_TUPLE:
                self._fail(f"a tuple is longer than {MAX_TUPLE}.", column)
            return tuple(self._checked(x, column) for x in value)
        is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_real or not math.isfinite(value):
            self._fail(f"{value!r} is not a finite number.", column)
        if abs(value) > MAX_MAGNITUDE and isinstance(value, int):
            self._fail(f"a whole number is larger than {MAX_MAGNITUDE}.", column)
        return value


def _number(x: Value) -> Value:
    if isinstance(x, tuple):
        raise TypeError("a tuple stands where a number is needed")
    return x


def _numbers_only(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *xs: function(*(_number(x) for x in xs))


def _add(a: Value, b: Value) -> Value:
    if isinstance(a, tuple) != isinstance(b, tuple):
        raise TypeError("a tuple and a number cannot be added")
    return a + b


def _multiply(a: Value, b: Value) -> Value:
    if isinstance(a, tuple) or isinstance(b, tuple):
        items, times = (a, b) if isinstance(a, tuple) else (b, a)
        if not isinstance(times, int):
            raise TypeError("a tuple can only be repeated a whole number of times")
        if len(items) * times > MAX_TUPLE:
            raise ValueError(f"a tuple would be longer than {MAX_TUPLE}")
        return items * times
    return a * b


def _power(base: Value, exponent: Value) -> Value:
    base, exponent = _number(base), _number(exponent)
    if abs(exponent) > 1024:
        raise ValueError("the exponent is larger than 1024")
    is_whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0
    if is_whole and base.bit_length() * exponent > 128:
        raise ValueError("the power is too large")
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a negative number has no such power")
    return base**exponent


def _items(*xs: Value) -> tuple[Any, ...]:
    """Takes `f(SHAPE)` and `f(1, 2)` alike."""
    items = xs[0] if len(xs) == 1 and isinstance(xs[0], tuple) else xs
    for item in items:
        _number(item)
    return items


def _of_items(function: Callable[[Any], Value]) -> Callable[..., Value]:
    return lambda *xs: function(_items(*xs))


def _length(x: Value) -> int:
    if not isinstance(x, tuple):
        raise TypeError("only a tuple has a length")
    return len(x)


_OPERATORS: dict[str, Callable[[Value, Value], Value]] = {
    "+": _add,
    "-": _numbers_only(operator.sub),
    "*": _multiply,
    "/": _numbers_only(operator.truediv),
    "//": _numbers_only(operator.floordiv),
    "%": _numbers_only(operator.mod),
    "**": _power,
}

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": _numbers_only(abs),
    "ceil": _numbers_only(math.ceil),
    "exp": _numbers_only(math.exp),
    "float": _numbers_only(float),
    "floor": _numbers_only(math.floor),
    "int": _numbers_only(int),
    "len": _length,
    "log": _numbers_only(math.log),
    "log10": _numbers_only(math.log10),
    "log2": _numbers_only(math.log2),
    "max": _of_items(max),
    "mean": _of_items(lambda xs: sum(xs) / len(xs)),
    "min": _of_items(min),
    "pow": _power,
    "prod": _of_items(math.prod),
    "round": _numbers_only(round),
    "sqrt": _numbers_only(math.sqrt),
    "sum": _of_items(sum),
}
