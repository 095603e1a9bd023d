"""Lines that ran, and the variables of calls."""

import sys

from tekoa.estimator.eject.watch import Watch


def double(x):
    y = 2 * x
    del x
    return y


def test_arguments_are_stored_even_if_deleted():
    before = sys.gettrace()
    with Watch(functions=[double]) as watch:
        double(2)
        double(3)
    assert watch.variables(double) == [{"x": 2, "y": 4}, {"x": 3, "y": 6}]
    assert watch.returned(double) == [4, 6]
    assert sys.gettrace() is before


def test_lines_are_counted():
    with Watch([__file__]) as watch:
        double(2)
        double(2)
    first = double.__code__.co_firstlineno
    assert [watch.lines[__file__][first + i] for i in (1, 2, 3)] == [2, 2, 2]
