"""Arithmetic on numbers and flat tuples whose work and results are bounded.

These are all the operators and functions that a formula can reach. Each refuses what
would take long or grow large before doing it, with a ValueError, TypeError or
ArithmeticError that says why.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

MAX_MAGNITUDE = 2**63
MAX_TUPLE = 64
MAX_EXPONENT = 1024

Value = Any  # int, float or a flat tuple of those.


def checked(value: Value) -> Value:
    """Gives `value` back if it is a finite, not too large number or a tuple of such.

    Raises:
        ValueError: If it is not.

    >>> checked((1, 2.5))
    (1, 2.5)
    """
    if isinstance(value, tuple):
        if len(value) > MAX_TUPLE:
            raise ValueError(f"a tuple is longer than {MAX_TUPLE}")
        return tuple(checked(x) for x in value)
    # Before anything else: a huge int cannot even be compared with a float.
    if isinstance(value, int) and abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"a whole number is larger than {MAX_MAGNITUDE}")
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _number(x: Value) -> Value:
    if isinstance(x, tuple):
        raise TypeError("a tuple stands where a number is needed")
    return x


def _of_numbers(function: Callable[..., Value], n_min: int = 1, n_max: int = 1) -> Any:
    """Allows numbers only, and no more arguments than are known to be harmless."""

    def call(*xs: Value) -> Value:
        if not n_min <= len(xs) <= n_max:
            wanted = str(n_min) if n_min == n_max else f"{n_min} or {n_max}"
            raise TypeError(f"{len(xs)} arguments are given where {wanted} can be")
        return function(*map(_number, xs))

    return call


def _of_items(function: Callable[[Any], Value]) -> Callable[..., Value]:
    """Takes `f(SHAPE)` and `f(1, 2)` alike."""

    def call(*xs: Value) -> Value:
        items = xs[0] if len(xs) == 1 and isinstance(xs[0], tuple) else xs
        return function(tuple(map(_number, items)))

    return call


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
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"the exponent is larger than {MAX_EXPONENT}")
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    # 0, 1 and -1 stay small under any exponent.
    if is_whole and abs(base) > 1 and base.bit_length() * exponent > 128:
        raise ValueError("the power is too large")
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a negative number has no such power")
    return base**exponent


def _length(x: Value) -> int:
    if not isinstance(x, tuple):
        raise TypeError("only a tuple has a length")
    return len(x)


def _mean(xs: tuple[Any, ...]) -> float:
    if not xs:
        raise ValueError("nothing has no mean")
    return sum(xs) / len(xs)


OPERATORS: dict[str, Callable[[Value, Value], Value]] = {
    "+": _add,
    "-": _of_numbers(operator.sub, 2, 2),
    "*": _multiply,
    "/": _of_numbers(operator.truediv, 2, 2),
    "//": _of_numbers(operator.floordiv, 2, 2),
    "%": _of_numbers(operator.mod, 2, 2),
    "**": _of_numbers(_power, 2, 2),
}

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": _of_numbers(abs),
    "ceil": _of_numbers(math.ceil),
    "exp": _of_numbers(math.exp),
    "float": _of_numbers(float),
    "floor": _of_numbers(math.floor),
    "int": _of_numbers(int),
    "len": _length,
    "log": _of_numbers(math.log, 1, 2),
    "log10": _of_numbers(math.log10),
    "log2": _of_numbers(math.log2),
    "max": _of_items(max),
    "mean": _of_items(_mean),
    "min": _of_items(min),
    "pow": _of_numbers(_power, 2, 2),
    "prod": _of_items(math.prod),
    # With a second argument, round(5, -10**9) would compute 10**10**9.
    "round": _of_numbers(round),
    "sqrt": _of_numbers(math.sqrt),
    "sum": _of_items(sum),
}
