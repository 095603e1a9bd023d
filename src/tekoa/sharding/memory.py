"""Estimates the peak memory of a computation on one device, without compiling it.

The equations of the traced function are visited in order. Each value is alive from its
definition to its last use, with the size of one device's shard. How a value is split
follows from its inputs and from the constraints in the model. The compiler fuses, reorders
and recomputes, so the actual peak is usually lower than the estimate.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from tekoa.sharding.specs import Entry, Sizes, axes_of

# For each dimension, the mesh axes over which it is split.
Split = tuple[tuple[str, ...], ...]

# The same numbers in another shape: no memory of their own.
_VIEWS = {"copy", "expand_dims", "reshape", "sharding_constraint", "squeeze", "transpose"}
# Fused into the operation that uses the result, unless that needs an array in memory.
_CHEAP = {
    *("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "div", "eq"),
    *("ge", "gt", "integer_pow", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not"),
    *("or", "pad", "select_n", "sign", "slice", "square", "stop_gradient", "sub"),
    *_VIEWS,
}
_REDUCTIONS = {
    *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum")
}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def peak_bytes(
    fn: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any], sizes: Sizes
) -> int:
    """Estimates the peak bytes of one device, without arguments and results.

    Args:
        fn: A function of trees of arrays; values that its result does not need are not counted.
        args: Its arguments, or their shapes.
        specs: A tree of specs for each argument.
        sizes: Sizes of the mesh's axes.
    """
    traced = jax.make_jaxpr(fn)(*args)
    leaves = zip(jax.tree.leaves(specs), jax.tree.leaves(args), strict=True)
    return _peak(_jaxpr(traced), [_split(spec, x.ndim) for spec, x in leaves], sizes)[1]


class Held(NamedTuple):
    """What holds memory at the peak of a computation.

    Attributes:
        n_bytes: Its size.
        aval: Shape and dtype; None for everything inside a loop.
        equation: The equation that computes it.
    """

    n_bytes: int
    aval: Any
    equation: Any


def held_at_peak(fn: Callable[..., Any], args: Sequence[Any]) -> list[Held]:
    """Estimates what is in memory at the peak on one device, largest first.

    Arguments and results of the function are left out.

    Args:
        fn: A function of trees of arrays.
        args: Its arguments, or their shapes.
    """
    traced = jax.make_jaxpr(fn)(*args)
    splits = [_split((), x.ndim) for x in jax.tree.leaves(tuple(args))]
    _, _, held = _peak(_jaxpr(traced), splits, {})
    return sorted(held, key=lambda h: -h.n_bytes)


@dataclasses.dataclass(eq=False)
class _Value:
    """An array of the computation."""

    aval: Any  # Its shape and dtype.
    split: Split = ()
    equation: Any = None  # The equation that computes it; None for arguments and constants.
    last_use: int = -1  # Index of the last operation that uses it; -1 if there is none.
    is_stored: bool = False  # Whether it is an array in memory.

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.aval, "shape", ())


@dataclasses.dataclass(eq=False)
class _Operation:
    """An equation after inlining of calls; `inside` is the peak of its own body in bytes."""

    name: str
    params: Mapping[str, Any]
    inputs: list[_Value]
    outputs: list[_Value]
    equation: Any
    inside: int = 0


def _peak(
    jaxpr: core.Jaxpr, splits: Sequence[Split], sizes: Sizes
) -> tuple[list[Split], int, list[Held]]:
    """Returns how the results are split, the peak in bytes, and what is held there."""
    inputs = [_Value(v.aval, split) for v, split in zip(jaxpr.invars, splits, strict=True)]
    operations: list[_Operation] = []
    results = _inline(jaxpr, inputs, operations)
    for operation in operations:
        _set_splits(operation, sizes)
    for operation in reversed(operations):
        _split_backwards(operation, sizes)
    _set_last_uses(operations, results)
    in_results = _with_sources(operations, results)
    freed_after: dict[int, list[_Value]] = {}
    alive: dict[_Value, int] = {}
    n_alive = peak = 0
    held: list[Held] = []
    for i, operation in enumerate(operations):
        for value in operation.outputs:
            if value.last_use > i and value.is_stored and value not in in_results:
                n_bytes = _n_bytes(value, sizes)
                n_alive += n_bytes
                alive[value] = n_bytes
                freed_after.setdefault(value.last_use, []).append(value)
        if n_alive + operation.inside > peak:
            peak = n_alive + operation.inside
            held = [Held(n, value.aval, value.equation) for value, n in alive.items()]
            if operation.inside:
                held.append(Held(operation.inside, None, operation.equation))
        n_alive -= sum(alive.pop(value) for value in freed_after.pop(i, []))
    return [value.split for value in results], peak, held


def _inline(jaxpr: core.Jaxpr, inputs: list[_Value], operations: list[_Operation]) -> list[_Value]:
    """Appends the operations of a function and of its callees; returns the results."""
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> _Value:
        if isinstance(atom, core.Literal) or atom not in values:  # A constant.
            return _Value(atom.aval, ((),) * len(getattr(atom.aval, "shape", ())))
        return values[atom]

    for eqn in jaxpr.eqns:
        arguments = [value_of(atom) for atom in eqn.invars]
        inner = _jaxpr(next((eqn.params[key] for key in _CALLS if key in eqn.params), None))
        is_call = eqn.primitive.name not in ("scan", "while", "cond")
        if is_call and isinstance(inner, core.Jaxpr) and len(inner.invars) == len(arguments):
            outputs = _inline(inner, arguments, operations)
        else:
            outputs = [_Value(var.aval, equation=eqn) for var in eqn.outvars]
            operations.append(_Operation(eqn.primitive.name, eqn.params, arguments, outputs, eqn))
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _set_last_uses(operations: list[_Operation], results: list[_Value]) -> None:
    """Sets the last use of each value; a fused operation reads its inputs at its own last use."""
    for value in results:
        value.last_use = len(operations)
    for i, operation in reversed(list(enumerate(operations))):
        needed = max((value.last_use for value in operation.outputs), default=-1)
        if needed < 0:
            continue
        is_cheap, is_view = operation.name in _CHEAP, operation.name in _VIEWS
        is_stored = any(value.is_stored for value in operation.outputs)
        for value in operation.outputs:
            value.is_stored = not is_view and (is_stored or not is_cheap)
        is_fused = is_cheap and (is_view or not is_stored) and needed < len(operations)
        for value in operation.inputs:
            value.last_use = max(value.last_use, needed if is_fused else i)
            if (is_view and is_stored) or not (is_cheap or operation.name in _REDUCTIONS):
                value.is_stored = True


def _with_sources(operations: list[_Operation], results: list[_Value]) -> set[_Value]:
    """Returns the results and the values that become results in place, such as sums."""
    in_results = set(results)
    for operation in reversed(operations):
        if operation.name == "scan":
            carries, _ = _of_scan(operation)
            pairs = zip(operation.inputs[carries], operation.outputs, strict=False)
            in_results.update(source for source, output in pairs if output in in_results)
        elif operation.name in _CHEAP and in_results.intersection(operation.outputs):
            n = math.prod(operation.outputs[0].aval.shape)
            in_results.update([v for v in operation.inputs if math.prod(v.shape) == n][:1])
    return in_results


def _set_splits(operation: _Operation, sizes: Sizes) -> None:
    inputs, params = [value.split for value in operation.inputs], operation.params
    match operation.name:
        case "scan":
            carries, n_carry = _of_scan(operation)
            inner = [*inputs[: carries.stop], *(split[1:] for split in inputs[carries.stop :])]
            results, operation.inside, _ = _peak(_jaxpr(params["jaxpr"]), inner, sizes)
            splits = [*results[:n_carry], *(((), *split) for split in results[n_carry:])]
        case "while":
            body = inputs[params["cond_nconsts"] :]
            splits, operation.inside, _ = _peak(_jaxpr(params["body_jaxpr"]), body, sizes)
        case "cond":
            branches = [_peak(_jaxpr(branch), inputs[1:], sizes) for branch in params["branches"]]
            splits, operation.inside = branches[0][0], max(peak for _, peak, _ in branches)
        case name:
            rule = _RULES.get(name, _elementwise)
            splits = [rule(operation, out) for out in operation.outputs]
    for value, split in zip(operation.outputs, splits, strict=True):
        value.split = _drop_uneven(split, value.shape, sizes)


def _of_scan(operation: _Operation) -> tuple[slice, int]:
    """Returns which inputs are the carry, and its length; from ranks, as parameters vary."""

    def n_not_scanned(variables: Sequence[Any], values: list[_Value]) -> int:
        pairs = zip(variables, values, strict=True)
        return sum(len(var.aval.shape) == len(value.aval.shape) for var, value in pairs)

    inner = _jaxpr(operation.params["jaxpr"])
    n_carry = n_not_scanned(inner.outvars, operation.outputs)
    stop = n_not_scanned(inner.invars, operation.inputs)
    return slice(stop - n_carry, stop), n_carry


def _jaxpr(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _split_backwards(operation: _Operation, sizes: Sizes) -> None:
    """Splits inputs that have no split yet, such as random numbers, like the output."""
    if operation.name in _RULES or not operation.outputs:
        return
    out = operation.outputs[0]
    for value in operation.inputs:
        if value.shape == out.shape and not any(value.split):
            value.split = _drop_uneven(out.split, value.shape, sizes)


def _drop_uneven(entries: Sequence[tuple[str, ...]], shape: Sequence[int], sizes: Sizes) -> Split:
    used: set[str] = set()
    split: list[tuple[str, ...]] = []
    for entry, dim in zip(entries, shape, strict=True):
        fits = not used & set(entry) and dim % math.prod(sizes[axis] for axis in entry) == 0
        split.append(entry if fits else ())
        used |= set(split[-1])
    return tuple(split)


def _n_bytes(value: _Value, sizes: Sizes) -> int:
    n_parts = math.prod(sizes[axis] for entry in value.split for axis in entry)
    return math.prod(value.aval.shape) * getattr(value.aval.dtype, "itemsize", 4) // n_parts


def _split(spec: Sequence[Entry], n_dims: int) -> Split:
    return (*map(axes_of, spec), *[()] * (n_dims - len(spec)))


def _elementwise(operation: _Operation, out: _Value) -> Split:
    """Splits a dimension like the inputs' dimension of the same index and size."""
    entries: list[tuple[str, ...]] = [()] * len(out.shape)
    for value in operation.inputs:
        for i, entry in enumerate(value.split[: len(out.shape)]):
            if entry and not entries[i] and value.shape[i] == out.shape[i]:
                entries[i] = entry
    return tuple(entries)


def _dot_general(operation: _Operation, _: _Value) -> Split:
    contracted, batch = operation.params["dimension_numbers"]
    splits = [value.split for value in operation.inputs]
    entries = [splits[0][i] or splits[1][j] for i, j in zip(*batch, strict=True)]
    for split, summed, shared in zip(splits, contracted, batch, strict=True):
        entries += [e for i, e in enumerate(split) if i not in summed and i not in shared]
    return tuple(entries)


def _broadcast(operation: _Operation, out: _Value) -> Split:
    entries: list[tuple[str, ...]] = [()] * len(out.aval.shape)
    for i, to in enumerate(operation.params["broadcast_dimensions"]):
        entries[to] = operation.inputs[0].split[i]
    return tuple(entries)


def _reduction(operation: _Operation, _: _Value) -> Split:
    axes = operation.params["axes"]
    return tuple(entry for i, entry in enumerate(operation.inputs[0].split) if i not in axes)


def _reshape(operation: _Operation, out: _Value) -> Split:
    """Keeps the split of dimensions that do not change, counted from both ends."""
    (value, *_), new = operation.inputs, out.aval.shape
    old, n = value.aval.shape, min(len(value.aval.shape), len(new))
    entries: list[tuple[str, ...]] = [()] * len(new)
    for indices in (range(n), range(-1, -n - 1, -1)):
        for i in indices:
            entries[i] = entries[i] or value.split[i]
            if old[i] != new[i]:
                break  # Rows that are merged or split stay on their devices.
    return tuple(entries)


_RULES: dict[str, Callable[[_Operation, _Value], Split]] = {
    "sharding_constraint": lambda op, out: _split(op.params["sharding"].spec, len(out.shape)),
    "dot_general": _dot_general,
    "transpose": lambda op, _: tuple(op.inputs[0].split[i] for i in op.params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    **dict.fromkeys(_REDUCTIONS, _reduction),
}
