"""Counts the floating point operations of a function: those of its products and convolutions.

Unlike the analysis of a compiled program, this counts the body of a loop as often as it runs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Returns the operations of one call; a multiplication and an addition count as two.

    A loop whose number of rounds depends on data counts once. Element-wise operations are left
    out, as is usual when the utilisation of a device is reported.

    Args:
        function: Any function that JAX can trace.
        *args: Its arguments, or their shapes.

    >>> x = jax.ShapeDtypeStruct((2, 3), 'float32')
    >>> count_flops(lambda x: x @ x.T, x)
    24.0
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(map(_count_equation, jaxpr.eqns), 0.0)


def _count_equation(equation: Any) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        lengths = [equation.invars[0].aval.shape[axis] for axis in contracted]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(lengths)
    if name == "conv_general_dilated":
        return _count_convolution(equation)
    if name == "cond":
        return max(_count(branch.jaxpr) for branch in equation.params["branches"])
    n_rounds = equation.params["length"] if name == "scan" else 1
    return n_rounds * sum(_count(inner) for inner in _inner(equation.params))


def _count_convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    numbers = equation.params["dimension_numbers"]
    # Per output: one product for each entry of the kernel that leads to its feature.
    n_products = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * n_products


def _inner(params: dict[str, Any]) -> list[Any]:
    """Returns the jaxprs among the parameters of an equation."""
    values = [x for v in params.values() for x in (v if isinstance(v, list | tuple) else [v])]
    closed = [getattr(value, "jaxpr", value) for value in values]
    return [value for value in closed if hasattr(value, "eqns")]
