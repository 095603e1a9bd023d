"""Programs that differ in constants only, as one program with these constants as inputs.

A number in a model file, such as a rate, is a constant of the traced program, by itself or in
numbers computed from it. Two programs are alike if they have the same equations and differ in the
values of constants alone. Then the constants that differ become inputs, wherever they are: in the
program itself, in the functions that it calls, and in loops and branches.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

from tekoa.core import trees

# Where a constant is: indices of equations, names of parameters and operands, from outside in.
Path = tuple[Any, ...]

# Operations whose inner programs are read, and the parameters in which they are.
_INNER = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), ("jaxpr",)),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "closed_call"), ("call_jaxpr",)),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
# Binding these again needs functions that only JAX itself can make from their parameters.
_ALWAYS_OPENED = ("custom_jvp_call", "custom_vjp_call", "closed_call")
# Parameters that `==` does not compare: arrays, NaN, other inner programs.
_BY_TEXT = (np.ndarray, np.generic, float, jax_core.ClosedJaxpr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced program.

    Attributes:
        program: The program.
        structure: Everything about it except the values of constants.
        constants: The constants, by where they are.
        out_tree: The structure of its result.
    """

    program: jax_core.ClosedJaxpr
    structure: tuple[Any, ...]
    constants: Mapping[Path, Any]
    out_tree: Any

    def is_like(self, other: "Traced") -> bool:
        """Whether two programs differ in the values of constants only."""
        return self.structure == other.structure


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """Traces a function and collects its constants.

    >>> import jax.numpy as jnp
    >>> a, b, c = (trace(lambda x, k=k: x * k, jnp.ones(2)) for k in (2.0, 3.0, jnp.ones(2)))
    >>> a.is_like(b), a.is_like(c)
    (True, False)
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    constants: dict[Path, Any] = {}
    structure = _read(program, (), constants)
    return Traced(
        program=program,
        structure=structure,
        constants=constants,
        out_tree=jax.tree.structure(shape),
    )


def merge(programs: Sequence[Traced]) -> tuple[Callable[..., Any], list[list[Any]]]:
    """Returns one function for several programs that are alike.

    Args:
        programs: The programs; all are like the first.

    Returns:
        `function(values, *args)`, and the values for each program: the constants that are not the
        same in all.

    >>> import jax.numpy as jnp
    >>> programs = [trace(lambda x, k=k: x * k + 1, jnp.ones(())) for k in (2.0, 3.0)]
    >>> function, values = merge(programs)
    >>> [float(function(v, jnp.ones(()))) for v in values]
    [3.0, 4.0]
    """
    first = programs[0]
    paths = [
        path for path in first.constants if not _is_same([p.constants[path] for p in programs])
    ]
    inner = {path[:n] for path in paths for n in range(1, len(path))}

    def function(values: Sequence[Any], *args: Any) -> Any:
        evaluator = _Evaluator(dict(zip(paths, values, strict=True)), inner)
        results = evaluator.run(first.program, jax.tree.leaves(args), ())
        return jax.tree.unflatten(first.out_tree, results)

    return function, [[p.constants[path] for path in paths] for p in programs]


def _is_same(values: Sequence[Any]) -> bool:
    first = values[0]
    if all(value is first for value in values):
        return True
    arrays = [jax.random.key_data(x) if trees.is_key(x) else x for x in values]
    return len({np.asarray(x).tobytes() for x in arrays}) == 1


def _read(program: Any, path: Path, constants: dict[Path, Any]) -> tuple[Any, ...]:
    """Returns the structure of a program, and adds its constants."""
    jaxpr, values = _open(program)
    numbers: dict[Any, int] = {}
    for i, (variable, value) in enumerate(zip(jaxpr.constvars, values, strict=True)):
        constants[*path, "const", i] = value
        numbers[variable] = len(numbers)
    for variable in jaxpr.invars:
        numbers[variable] = len(numbers)

    def read_atom(atom: Any, own_path: Path) -> tuple[Any, ...]:
        if isinstance(atom, jax_core.Literal):
            # Numbers of Python have no precision of their own.
            aval: Any = atom.aval
            constants[own_path] = np.asarray(atom.val, aval.dtype)
            return "constant", _form(atom)
        return "variable", numbers[atom]

    equations = []
    for i, equation in enumerate(jaxpr.eqns):
        operands = [read_atom(atom, (*path, i, j)) for j, atom in enumerate(equation.invars)]
        params = _read_params(equation, (*path, i), constants)
        for variable in equation.outvars:
            numbers[variable] = len(numbers)
        forms = [_form(variable) for variable in equation.outvars]
        equations.append((equation.primitive.name, operands, params, forms))
    inputs = [_form(variable) for variable in (*jaxpr.constvars, *jaxpr.invars)]
    results = [read_atom(atom, (*path, "out", k)) for k, atom in enumerate(jaxpr.outvars)]
    return inputs, equations, results


def _read_params(equation: Any, path: Path, constants: dict[Path, Any]) -> list[tuple[str, Any]]:
    name = equation.primitive.name
    read = []
    for key, value in sorted(equation.params.items()):
        if key in _INNER.get(name, ()):
            programs = value if isinstance(value, (tuple, list)) else (value,)
            inner = [_read(p, (*path, key, k), constants) for k, p in enumerate(programs)]
            read.append((key, inner))
        elif name.startswith("custom_"):
            continue  # The derivative, which has been taken.
        elif isinstance(value, _BY_TEXT) or hasattr(value, "eqns"):
            read.append((key, str(value)))
        else:
            read.append((key, value))
    return read


def _form(atom: Any) -> tuple[Any, ...]:
    aval = atom.aval
    return str(aval), getattr(aval, "weak_type", None)


def _open(program: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a program and its constants; only a closed one has any."""
    is_closed = isinstance(program, jax_core.ClosedJaxpr)
    return (program.jaxpr, program.consts) if is_closed else (program, ())


class _Evaluator:
    """Evaluates a program with other values for some of its constants.

    Args:
        values: The values, by path.
        inner: Paths of the inner programs that contain some of them.
    """

    def __init__(self, values: Mapping[Path, Any], inner: set[Path]):
        self._values, self._inner = values, inner

    def run(self, program: Any, args: Sequence[Any], path: Path) -> list[Any]:
        jaxpr, consts = _open(program)
        known: dict[Any, Any] = {
            variable: self._values.get((*path, "const", i), value)
            for i, (variable, value) in enumerate(zip(jaxpr.constvars, consts, strict=True))
        }
        known |= zip(jaxpr.invars, args, strict=True)

        def read(atom: Any, own_path: Path) -> Any:
            if isinstance(atom, jax_core.Literal):
                return self._values.get(own_path, atom.val)
            return known[atom]

        for i, equation in enumerate(jaxpr.eqns):
            operands = [read(atom, (*path, i, j)) for j, atom in enumerate(equation.invars)]
            results = self._apply(equation, operands, (*path, i))
            known |= zip(equation.outvars, results, strict=True)
        return [read(atom, (*path, "out", k)) for k, atom in enumerate(jaxpr.outvars)]

    def _apply(self, equation: Any, operands: list[Any], path: Path) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        inner = [(key, (*path, key)) for key in _INNER.get(name, ())]
        is_opened = any(own_path in self._inner for _, own_path in inner)
        if name == "div" and (*path, 1) in self._values and _is_float(operands[1]):
            # As XLA divides by a constant, so that a lane has the bits of a run by itself.
            return [operands[0] * (1 / operands[1])]
        if not is_opened and not name.startswith(_ALWAYS_OPENED):
            results = equation.primitive.bind(*operands, **params)
            return list(results) if equation.primitive.multiple_results else [results]
        if name == "scan":
            return self._scan(equation, operands, path)
        if name == "while":
            return self._while(params, operands, path)
        if name == "cond":
            branches = [
                lambda *args, k=k, branch=branch: self.run(branch, args, (*path, "branches", k))
                for k, branch in enumerate(params["branches"])
            ]
            return jax.lax.switch(operands[0], branches, *operands[1:])
        key, own_path = inner[0]
        return self.run(params[key], operands, (*own_path, 0))

    def _scan(self, equation: Any, operands: list[Any], path: Path) -> list[Any]:
        params, body = equation.params, equation.params["jaxpr"].jaxpr
        # Counted from shapes: scanned arrays have one axis more outside than inside.
        n_xs = _n_stacked(equation.invars, body.invars)
        n_carry = len(equation.outvars) - _n_stacked(equation.outvars, body.outvars)
        n_consts = len(operands) - n_carry - n_xs
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]

        def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(params["jaxpr"], [*consts, *carry, *row], (*path, "jaxpr", 0))
            return results[:n_carry], results[n_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll") if name in params}
        carry, ys = jax.lax.scan(step, operands[n_consts : n_consts + n_carry], xs, **options)
        return [*carry, *ys]

    def _while(self, params: Any, operands: list[Any], path: Path) -> list[Any]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]

        def is_on(carry: list[Any]) -> Any:
            args = [*cond_consts, *carry]
            return self.run(params["cond_jaxpr"], args, (*path, "cond_jaxpr", 0))[0]

        def step(carry: list[Any]) -> list[Any]:
            return self.run(params["body_jaxpr"], [*body_consts, *carry], (*path, "body_jaxpr", 0))

        return jax.lax.while_loop(is_on, step, operands[n_cond + n_body :])


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _n_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = itertools.zip_longest(outside, inside)
    return sum(a.aval.ndim > b.aval.ndim for a, b in pairs)
