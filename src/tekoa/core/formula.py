"""Evaluates arithmetic formulas such as 'sqrt(1 / prod(SHAPE[:-1]))'.

Formulas come from configs and files, so they are not trusted. Only text that consists of numbers,
known names and arithmetic symbols is passed to `ast.parse`, and only the node types below are
evaluated, never by Python itself. Every operation is bounded in time and size.
"""

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_LENGTH = 300
MAX_DEPTH = 24
MAX_MAGNITUDE = 2**63
MAX_TUPLE = 64
MAX_EXPONENT = 1024

Shape = tuple[int, ...]
Value = Any  # An int, a float or a flat tuple of those.


class FormulaError(ValueError):
    """A formula is invalid; `column` (from 1) is the position of the error."""

    def __init__(self, formula: str, column: int, problem: str):
        shown = formula if len(formula) <= 60 else formula[:57] + "..."
        super().__init__(
            f"Cannot read formula {shown!r} at column {column}: {problem}. A formula has numbers, "
            f"tuples, + - * / // % **, SHAPE and the functions {', '.join(sorted(FUNCTIONS))}."
        )
        self.column = column


def evaluate(formula: str, shape: Sequence[int] = ()) -> float | int | Shape:
    """Computes a formula in which `SHAPE` is the shape of a variable.

    Args:
        formula: ASCII text of at most 300 characters.
        shape: The value of `SHAPE`.

    Returns:
        A finite number, or a tuple of ints.

    Raises:
        FormulaError: If the text is not such a formula; the error has the column.

    >>> evaluate('sqrt(2 / prod(SHAPE[:-1]))', (3, 3, 2, 64))
    0.3333333333333333
    >>> evaluate('(1,) * (len(SHAPE) - 1) + SHAPE[-1:]', (3, 3, 2, 64))
    (1, 1, 1, 64)
    """
    if not isinstance(formula, str):
        raise TypeError(f"A formula must be a str, got {formula!r}.")
    value = _Evaluator(formula, tuple(map(operator.index, shape))).value(_parse(formula))
    if isinstance(value, tuple) and not all(isinstance(x, int) for x in value):
        raise FormulaError(formula, 1, "the result is a tuple with items that are not integers")
    return value


def _parse(text: str) -> ast.expr:
    """Parses a text, in parentheses, if it has only the tokens of a formula."""
    if len(text) > MAX_LENGTH:
        raise FormulaError(text, MAX_LENGTH + 1, f"it is longer than {MAX_LENGTH} characters")
    end = depth = 0
    while token := _TOKEN.match(text, end):
        end = token.end()
    for i, depth in enumerate(itertools.accumulate((c in "([") - (c in ")]") for c in text[:end])):
        if depth > MAX_DEPTH:
            raise FormulaError(text, i + 1, f"it is nested deeper than {MAX_DEPTH} levels")
        if depth < 0:
            raise FormulaError(text, i + 1, f"unmatched {text[i]!r}")
    if end < len(text):
        name = re.match("[A-Za-z_][A-Za-z_0-9]*", text[end:])
        problem = f"{name[0]!r} is not a known name" if name else f"{text[end]!r} is not allowed"
        raise FormulaError(text, end + 1, problem)
    if depth or not text.strip():
        raise FormulaError(text, end + 1, "the formula is not complete")
    try:
        # In parentheses leading spaces are allowed, and offsets from 0 are columns from 1.
        return ast.parse(f"({text})", mode="eval").body
    except SyntaxError as error:
        raise FormulaError(text, max(1, (error.offset or 2) - 1), error.msg) from None


class _Evaluator:
    """Computes the value of a syntax tree; an error has the column of the node that failed."""

    def __init__(self, text: str, shape: Shape):
        self._text, self._shape = text, shape

    def value(self, node: ast.expr, depth: int = 0) -> Value:
        """Computes a node; `depth` counts signs and exponents, which nest without brackets."""
        column = max(1, node.col_offset)
        if depth > MAX_DEPTH:
            raise FormulaError(self._text, column, f"it is nested deeper than {MAX_DEPTH} levels")
        match node:
            case ast.Constant():
                return self._compute(column, lambda: node.value)
            case ast.Name(id="SHAPE"):
                return self._shape
            case ast.Tuple(elts=nodes):
                items = [self.value(item, depth) for item in nodes]
                return self._compute(column, lambda: tuple(map(_check_number, items)))
            case ast.UnaryOp(op=sign, operand=operand):
                return self._compute(column, _SIGNS[type(sign)], self.value(operand, depth + 1))
            case ast.BinOp():
                return self._binary(node, depth)
            case ast.Call(func=ast.Name(id=name), args=nodes, keywords=[]) if name in FUNCTIONS:
                arguments = [self.value(argument, depth) for argument in nodes]
                return self._compute(column, FUNCTIONS[name], *arguments)
            case ast.Subscript(value=items, slice=index):
                is_slice = isinstance(index, ast.Slice)
                bounds = (index.lower, index.upper, index.step) if is_slice else (index,)
                items, indices = self.value(items, depth), [self._index(x, depth) for x in bounds]
                selection = slice(*indices) if is_slice else indices[0]
                return self._compute(self._find("[", node.value), _select, items, selection)
        raise FormulaError(self._text, column, "a value is expected here")

    def _binary(self, node: ast.expr, depth: int) -> Value:
        # A loop over left operands: a long sum must not recurse once per term.
        nodes: list[ast.BinOp] = []
        while isinstance(node, ast.BinOp):
            nodes.append(node)
            node = node.left
        value = self.value(node, depth)
        for binary in reversed(nodes):
            symbol = _SYMBOLS[type(binary.op)]
            right = self.value(binary.right, depth + (symbol == "**"))
            value = self._compute(self._find(symbol, binary.left), OPERATORS[symbol], value, right)
        return value

    def _index(self, node: ast.expr | None, depth: int) -> int | None:
        index = None if node is None else self.value(node, depth)
        if node is not None and not isinstance(index, int):
            raise FormulaError(self._text, node.col_offset, "an index must be an integer")
        return index

    def _find(self, symbol: str, before: ast.expr) -> int:
        """Returns the column of the first such symbol after a node."""
        return self._text.index(symbol, (before.end_col_offset or 1) - 1) + 1

    def _compute(self, column: int, function: Callable[..., Value], *arguments: Value) -> Value:
        try:
            return checked(function(*arguments))
        except (ArithmeticError, ValueError, TypeError) as error:
            raise FormulaError(self._text, column, str(error)) from None


def checked(value: Value) -> Value:
    """Returns `value` if it is a finite number below the limit or a tuple of such numbers.

    Raises:
        ValueError: If it is not.

    >>> checked((1, 2.5))
    (1, 2.5)
    """
    if isinstance(value, tuple):
        if len(value) > MAX_TUPLE:
            raise ValueError(f"a tuple is longer than {MAX_TUPLE}")
        return tuple(map(checked, value))
    # Before anything else: a huge int cannot even be compared with a float.
    if isinstance(value, int) and abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"an integer is larger than {MAX_MAGNITUDE}")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _check_number(x: Value) -> Value:
    if isinstance(x, tuple):
        raise TypeError("a tuple is used where a number is needed")
    return x


def _of_numbers(function: Callable[..., Value], *n_arguments: int) -> Any:
    """Restricts a function to numbers, and to a number of arguments known to be harmless."""

    def call(*xs: Value) -> Value:
        if len(xs) not in n_arguments:
            allowed = " or ".join(map(str, n_arguments))
            raise TypeError(f"expected {allowed} argument(s), got {len(xs)}")
        return function(*map(_check_number, xs))

    return call


def _of_items(function: Callable[[Any], Value]) -> Callable[..., Value]:
    """Lets a function of a tuple be called as `f(SHAPE)` and as `f(1, 2)`."""

    def call(*xs: Value) -> Value:
        items = xs[0] if len(xs) == 1 and isinstance(xs[0], tuple) else xs
        return function(tuple(map(_check_number, items)))

    return call


def _multiply(a: Value, b: Value) -> Value:
    items, times = (b, a) if isinstance(b, tuple) else (a, b)
    if isinstance(items, tuple) and isinstance(times, int) and len(items) * times > MAX_TUPLE:
        raise ValueError(f"a tuple would be longer than {MAX_TUPLE}")
    return a * b


def _power(base: Value, exponent: Value) -> Value:
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"the exponent is larger than {MAX_EXPONENT}")
    is_integer = isinstance(base, int) and isinstance(exponent, int)
    # 0, 1 and -1 stay small under any exponent.
    if is_integer and abs(base) > 1 and base.bit_length() * exponent > 128:
        raise ValueError("the power is too large")
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a negative number cannot have a fractional exponent")
    return base**exponent


def _mean(xs: tuple[Any, ...]) -> float:
    if not xs:
        raise ValueError("mean() of an empty tuple")
    return sum(xs) / len(xs)


def _variance(xs: tuple[Any, ...]) -> float:
    mean = _mean(xs)
    return _mean(tuple((x - mean) ** 2 for x in xs))


def _select(items: Value, selection: Any) -> Value:
    if not isinstance(items, tuple):
        raise TypeError("only SHAPE and tuples can be indexed")
    try:
        return items[selection]
    except (IndexError, ValueError):
        raise ValueError(f"no such item in a tuple of length {len(items)}") from None


OPERATORS: dict[str, Callable[[Value, Value], Value]] = {
    "+": operator.add,
    "-": _of_numbers(operator.sub, 2),
    "*": _multiply,
    "/": _of_numbers(operator.truediv, 2),
    "//": _of_numbers(operator.floordiv, 2),
    "%": _of_numbers(operator.mod, 2),
    "**": _of_numbers(_power, 2),
}
_NODES = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_SYMBOLS: dict[type[ast.operator], str] = dict(zip(_NODES, OPERATORS, strict=True))
_SIGNS: Any = {ast.USub: _of_numbers(operator.neg, 1), ast.UAdd: _of_numbers(operator.pos, 1)}

_MATH = (math.cbrt, math.ceil, math.exp, math.floor, math.isqrt, math.log10, math.log2)
FUNCTIONS: dict[str, Callable[..., Value]] = {
    # With a second argument, round(5, -10**9) would compute 10**10**9.
    **{
        fn.__name__: _of_numbers(fn, 1)
        for fn in (abs, float, int, round, *_MATH, math.sqrt, math.tanh)
    },
    **{fn.__name__: _of_items(fn) for fn in (max, min, math.prod, sum)},
    "gcd": _of_numbers(math.gcd, 2),
    "hypot": _of_numbers(math.hypot, 2),
    "len": len,
    "log": _of_numbers(math.log, 1, 2),
    "mean": _of_items(_mean),
    "pow": _of_numbers(_power, 2),
    # Names of NumPy.
    "amax": _of_items(max),
    "amin": _of_items(min),
    "power": _of_numbers(_power, 2),
    "square": _of_numbers(lambda x: x * x, 1),
    "var": _of_items(_variance),
}

_TOKEN = re.compile(
    r"[ \t(),:\[\]+*/%-]|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])"
    rf"|(?:SHAPE|{'|'.join(FUNCTIONS)})(?![A-Za-z_0-9])"
)
