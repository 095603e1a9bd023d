import math

import pytest

from tekoa.core import arithmetic


@pytest.mark.parametrize("value", [0, -3, 2**63, -(2**63), 1e300, (), (1, 2), (1.5, -2)])
def test_finite_values_pass(value):
    assert arithmetic.checked(value) == value


@pytest.mark.parametrize(
    "value",
    [2**63 + 1, -(2**63) - 1, 10**400, math.inf, math.nan, 1j, True, None, "1", (1,) * 65, (1, "")],
)
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"finite|larger|longer"):
        arithmetic.checked(value)


@pytest.mark.parametrize(
    ("symbol", "left", "right", "expected"),
    [
        ("+", (1,), (2, 3), (1, 2, 3)),
        ("*", (1, 2), 2, (1, 2, 1, 2)),
        ("*", 2, (1,), (1, 1)),
        ("*", (1,), -5, ()),
        ("//", -7, 2, -4),
        ("%", -7, 3, 2),
        ("**", 2, -1, 0.5),
        ("**", -8, 3, -512),
        ("**", 1, 1024, 1),
        ("**", 0.5, 0.5, math.sqrt(0.5)),
    ],
)
def test_operators_agree_with_arithmetic(symbol, left, right, expected):
    assert arithmetic.OPERATORS[symbol](left, right) == expected


@pytest.mark.parametrize(
    ("symbol", "left", "right"),
    [
        ("+", (1,), 2),
        ("-", (1,), (1,)),
        ("*", (1,), (1,)),
        ("*", (1,), 1.5),
        ("*", (1, 2), 10**9),
        ("/", 1, 0),
        ("//", 1, 0),
        ("%", 1, 0),
        ("**", 9, 9**9),
        ("**", 10, 50),
        ("**", 0, -1),
        ("**", -2, 0.5),
        ("**", 1e300, 3.0),
        ("**", (1,), 2),
    ],
)
def test_operators_refuse_before_working(symbol, left, right):
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        arithmetic.OPERATORS[symbol](left, right)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("prod", [(2, 3, 4)], 24),
        ("prod", [()], 1),
        ("sum", [1, 2, 3], 6),
        ("max", [(1, 5, 2)], 5),
        ("min", [4, 2], 2),
        ("mean", [(1, 2)], 1.5),
        ("len", [(7, 7, 7)], 3),
        ("log", [8, 2], 3.0),
        ("log2", [8], 3.0),
        ("log10", [1000], 3.0),
        ("pow", [2, 5], 32),
        ("floor", [2.7], 2),
        ("ceil", [2.2], 3),
        ("round", [2.6], 3),
        ("int", [-2.6], -2),
        ("float", [2], 2.0),
        ("abs", [-2], 2),
        ("sqrt", [16], 4.0),
        ("exp", [0], 1.0),
    ],
)
def test_functions_agree_with_mathematics(name, arguments, expected):
    assert arithmetic.FUNCTIONS[name](*arguments) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("round", [5, -(10**9)]),  # Python would compute 10**10**9.
        ("int", []),
        ("float", []),
        ("sqrt", [-1]),
        ("sqrt", [(4,)]),
        ("log", [0]),
        ("log", [2, 1]),
        ("exp", [10**6]),
        ("max", []),
        ("max", [()]),
        ("mean", []),
        ("sum", [(1,), (2,)]),
        ("len", [3]),
        ("pow", [2]),
        ("pow", [2, 10, 7]),
    ],
)
def test_functions_refuse_what_they_cannot_do(name, arguments):
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        arithmetic.FUNCTIONS[name](*arguments)
