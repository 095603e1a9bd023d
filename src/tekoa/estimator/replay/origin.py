"""Finds the operation in which a NaN or Inf of a function's result began.

The function is traced and evaluated one operation at a time. From a result that is not finite, the
search goes back along the operands that are not finite either. Values that are finite again, such
as the exponential of a mask of minus infinity, are not part of that path, so that masks and
`jnp.where` are not accused.
"""

import dataclasses
import pathlib
import re
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

import tekoa

# The parts of a path that mark the code of installed packages.
_PACKAGES = {"site-packages", "dist-packages"}
_PYTHON, _JAX = pathlib.Path(sysconfig.get_path("stdlib")), pathlib.Path(jax.__file__).parent
_PACKAGE = pathlib.Path(tekoa.__file__).parent
# Files of the package that are a user's model as well.
_MODELS = (_PACKAGE / "models", _PACKAGE / "recipes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a NaN or Inf began.

    Attributes:
        operation: The name of the operation, such as "log"; empty if an argument of the function
            was not finite already.
        argument: Which argument was not finite, counted over their leaves; None if none was.
        file: The file of the user's code that called the operation; if none did, as in a loss by
            name, that of the package that did; empty if unknown.
        line: The line in that file.
        layer: The names of the modules around the operation, as far as the library gives any.
        is_backward: Whether the operation belongs to the gradient of that line.
        operands: Describes the operands: shape, smallest and largest value.
        result: Describes the result.
    """

    operation: str = ""
    argument: int | None = None
    file: str = ""
    line: int = 0
    layer: str = ""
    is_backward: bool = False
    operands: tuple[str, ...] = ()
    result: str = ""


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where an operation is: the names around it, and the calls that lead to it."""

    names: str = ""
    calls: tuple[Any, ...] = ()

    def inside(self, equation: Any) -> "_Scope":
        """Returns the scope of an equation in this one."""
        info = equation.source_info
        names = "/".join(filter(None, [self.names, str(info.name_stack)]))
        return _Scope(names, (*self.calls, info))

    @property
    def line(self) -> tuple[str, int]:
        """The line of the model that calls the operation.

        Functions of JAX, such as `jnp.linalg.norm`, keep the program of their first call, which
        names no line of the model: then the line of the call counts. For a loss by name, or an
        optimizer, it is a line of a package.
        """
        innermost = self.calls[::-1]
        lines = [*map(user_line, innermost), *(_line(call, "package") for call in innermost)]
        return next((line for line in lines if line[0]), ("", 0))


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """A value, and how it was made if it is not finite."""

    array: Any
    is_constant: bool = False
    argument: int | None = None
    event: "_Event | None" = None

    @property
    def has_nan(self) -> bool:
        return _count(self.array, np.isnan) > 0

    @property
    def is_bad(self) -> bool:
        return self.event is not None or _count(self.array, lambda x: ~np.isfinite(x)) > 0


@dataclasses.dataclass(frozen=True, eq=False)
class _Event:
    """An operation whose result is not finite."""

    number: int
    equation: Any
    operands: list[_Value]
    results: list[Any]
    scope: "_Scope"


def find_origin(
    function: Callable[..., Any], args: Sequence[Any], is_target: Callable[[str], bool]
) -> Origin | None:
    """Evaluates a function and returns where a NaN or Inf in its result began.

    Args:
        function: A function that JAX can trace.
        args: Its arguments.
        is_target: Whether a leaf of the result, by its path, may be the start of the search.

    Returns:
        None if all those results are finite.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves = [_Value(x, argument=i) for i, x in enumerate(jax.tree.leaves(tuple(args)))]
    results = _Evaluator().run(closed, leaves, _Scope())
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shape)]
    for path, value in zip(paths, results, strict=True):
        if is_target(path) and value.is_bad:
            return _search(value)
    return None


def _search(value: _Value) -> Origin:
    """Follows operands that are not finite back to the operation where that began."""
    nan_born: _Event | None = None
    while value.event is not None:
        event = value.event
        bad = [operand for operand in event.operands if operand.is_bad]
        with_nan = [operand for operand in bad if operand.has_nan]
        makes_nan = not with_nan and any(_count(x, np.isnan) for x in event.results)
        if makes_nan:
            nan_born = event
        candidates = with_nan or [operand for operand in bad if not operand.is_constant]
        if not candidates:
            # Infinities that the code itself contains, such as masks, are meant.
            born = nan_born if bad and nan_born is not None else event
            return _describe(born)
        value = min(
            candidates, key=lambda operand: -1 if operand.event is None else operand.event.number
        )
    return Origin(argument=value.argument, result=describe_array(value.array))


class _Evaluator:
    """Evaluates a jaxpr one equation at a time, with the calls and loops in it unrolled."""

    def __init__(self):
        self._n_events = 0

    def run(self, closed: Any, args: Sequence[_Value], scope: _Scope) -> list[_Value]:
        jaxpr = closed.jaxpr
        known: dict[Any, _Value] = {}
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            known[variable] = _Value(constant, is_constant=True)
        known |= zip(jaxpr.invars, args, strict=True)

        def read(atom: Any) -> _Value:
            if isinstance(atom, jax_core.Literal):
                return _Value(atom.val, is_constant=True)
            return known[atom]

        for equation in jaxpr.eqns:
            results = self._evaluate(equation, [read(atom) for atom in equation.invars], scope)
            known |= zip(equation.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluate(self, equation: Any, operands: list[_Value], scope: _Scope) -> list[_Value]:
        scope = scope.inside(equation)
        kind, params = equation.primitive.name, equation.params
        if kind == "scan":
            return self._scan(equation, operands, scope)
        if kind == "while":
            return self._while(params, operands, scope)
        if kind == "cond":
            index = int(operands[0].array)
            branch = params["branches"][min(max(index, 0), len(params["branches"]) - 1)]
            return self.run(branch, operands[1:], scope)
        for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = params.get(name)
            if inner is not None and kind not in _OPAQUE:
                closed = inner if hasattr(inner, "consts") else jax_core.ClosedJaxpr(inner, ())
                return self.run(closed, operands, scope)
        return self._apply(equation, operands, scope)

    def _apply(self, equation: Any, operands: list[_Value], scope: _Scope) -> list[_Value]:
        arrays = [operand.array for operand in operands]
        results = equation.primitive.bind(*arrays, **equation.params)
        results = results if equation.primitive.multiple_results else [results]
        is_constant = all(operand.is_constant for operand in operands)
        event = None
        if any(_count(x, lambda x: ~np.isfinite(x)) for x in results):
            event = _Event(self._n_events, equation, operands, results, scope)
            self._n_events += 1
        return [_Value(x, is_constant, event=event if _Value(x).is_bad else None) for x in results]

    def _scan(self, equation: Any, operands: list[_Value], scope: _Scope) -> list[_Value]:
        params, body = equation.params, equation.params["jaxpr"].jaxpr
        # Counted from shapes: scanned arrays have one axis more outside than inside.
        n_xs = sum(a.aval.ndim > b.aval.ndim for a, b in zip(equation.invars, body.invars))
        n_ys = sum(a.aval.ndim > b.aval.ndim for a, b in zip(equation.outvars, body.outvars))
        n_carry = len(equation.outvars) - n_ys
        n_consts = len(operands) - n_carry - n_xs
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        xs = operands[n_consts + n_carry :]
        n = params["length"]
        steps: dict[int, list[_Value]] = {}
        for i in reversed(range(n)) if params["reverse"] else range(n):
            rows = [dataclasses.replace(x, array=x.array[i]) for x in xs]
            results = self.run(params["jaxpr"], [*consts, *carry, *rows], scope)
            carry, steps[i] = results[:n_carry], results[n_carry:]
        columns = zip(*(steps[i] for i in range(n)), strict=True) if n else ()
        return [*carry, *map(_stack, columns)]

    def _while(self, params: Any, operands: list[_Value], scope: _Scope) -> list[_Value]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, rest = operands[:n_cond], operands[n_cond:]
        body_consts, carry = rest[:n_body], rest[n_body:]
        while bool(self.run(params["cond_jaxpr"], [*cond_consts, *carry], scope)[0].array):
            carry = self.run(params["body_jaxpr"], [*body_consts, *carry], scope)
        return carry


# Operations with a jaxpr of their own that is not a call.
_OPAQUE = {"custom_linear_solve", "reduce", "reduce_window", "scatter-add", "scatter"}


def _stack(values: Sequence[_Value]) -> _Value:
    """Stacks the results of all iterations; the first that is not finite stands for them."""
    bad = next((value for value in values if value.is_bad), values[0])
    return dataclasses.replace(bad, array=jnp.stack([value.array for value in values]))


def _describe(event: _Event) -> Origin:
    file, line = event.scope.line
    floats = [operand.array for operand in event.operands if _is_float(operand.array)]
    return Origin(
        operation=event.equation.primitive.name,
        file=file,
        line=line,
        layer=layer_of(event.scope.names),
        is_backward="transpose(" in event.scope.names,
        operands=tuple(map(describe_array, floats)),
        result=", ".join(describe_array(x) for x in event.results),
    )


def user_line(source_info: Any) -> tuple[str, int]:
    """Returns the innermost line of code that belongs to no package."""
    return _line(source_info, "user")


def _line(source_info: Any, owner: str) -> tuple[str, int]:
    for frame in getattr(source_info.traceback, "frames", ()):
        path = pathlib.Path(frame.file_name)
        if path.is_absolute() and _owner(path) == owner:
            return str(path), frame.line_num
    return "", 0


def _owner(path: pathlib.Path) -> Literal["user", "package", "jax", "python"]:
    """Returns whose code a file is."""
    if path.is_relative_to(_JAX):
        return "jax"
    if path.is_relative_to(_PACKAGE):
        return "user" if path.parent in _MODELS else "package"
    if _PACKAGES & {*path.parts}:
        return "package"
    return "python" if path.is_relative_to(_PYTHON) else "user"


def layer_of(names: str) -> str:
    """Returns the names of modules without the names of transformations.

    >>> layer_of('transpose(jvp(Model))/Dense_0')
    'Model/Dense_0'
    """
    return re.sub(r"/+", "/", re.sub(r"\w+\(|\)", "", names)).strip("/")


def describe_array(array: Any) -> str:
    """Describes an array: shape, dtype, range, and how many values are not finite.

    >>> describe_array(np.array([1.0, np.inf], np.float32))
    'float32[2]: from 1 to 1, 1 Inf'
    """
    values = np.asarray(array).astype(np.float64)
    finite = values[np.isfinite(values)]
    limits = f"from {finite.min():.4g} to {finite.max():.4g}" if finite.size else "nothing finite"
    counts = {"NaN": np.isnan(values).sum(), "Inf": np.isinf(values).sum()}
    bad = "".join(f", {n} {name}" for name, n in counts.items() if n)
    return f"{np.asarray(array).dtype}[{','.join(map(str, values.shape))}]: {limits}{bad}"


def _is_float(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return isinstance(array, float)
    return jnp.issubdtype(dtype, jnp.inexact)


def _count(array: Any, test: Callable[[Any], Any]) -> int:
    """Returns how many entries of a floating point array pass a test."""
    return int(np.sum(test(np.asarray(array)))) if _is_float(array) else 0
