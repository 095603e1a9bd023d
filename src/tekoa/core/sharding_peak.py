"""An estimate of what a computation holds at once on one device, without compiling it.

The equations of the traced function are walked in order; each value lives from where it is
made to its last use, at the size of one device's part. How a value is split follows from
its inputs and from the constraints in the model. A compiler fuses, reorders and recomputes:
it mostly stays below the estimate.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from tekoa.core.sharding_specs import Entry, Sizes

# For each dimension, the mesh axes over which it is split.
Split = tuple[tuple[str, ...], ...]

# The same numbers in another form: no memory of their own.
_VIEWS = {"copy", "expand_dims", "reshape", "sharding_constraint", "squeeze", "transpose"}
# What a compiler computes where it is used, unless an operation outside needs it as an array.
_CHEAP = {
    *("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "div", "eq"),
    *("ge", "gt", "integer_pow", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not"),
    *("or", "pad", "select_n", "sign", "slice", "square", "stop_gradient", "sub"),
    *_VIEWS,
}
_REDUCTIONS = {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"}
_REDUCTIONS |= {"reduce_sum"}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def peak_bytes(
    fn: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any], sizes: Sizes
) -> int:
    """Estimates the most bytes that one device holds beside the arguments and results.

    Args:
        fn: A function of trees of arrays; what does not reach its result is not counted.
        args: Its arguments, or their shapes.
        specs: For each of them, a tree of specs.
        sizes: Sizes of the mesh's axes.
    """
    traced = jax.make_jaxpr(fn)(*args)
    leaves = zip(jax.tree.leaves(specs), jax.tree.leaves(args), strict=True)
    return _peak(_opened(traced), [_split(spec, x.ndim) for spec, x in leaves], sizes)[1]


@dataclasses.dataclass(eq=False)
class _Value:
    """An array of the computation.

    Attributes:
        aval: Its shape and dtype.
        split: How it is split.
        last: The operation that needs it last; -1: none does.
        is_kept: Whether it is an array in memory.
    """

    aval: Any
    split: Split = ()
    last: int = -1
    is_kept: bool = False


@dataclasses.dataclass(eq=False)
class _Operation:
    """An equation outside of all calls; `inside` is what it holds while it runs."""

    name: str
    params: Mapping[str, Any]
    inputs: list[_Value]
    outputs: list[_Value]
    inside: int = 0


def _peak(jaxpr: core.Jaxpr, splits: Sequence[Split], sizes: Sizes) -> tuple[list[Split], int]:
    """Gives how the results are split, and the most that is held inside."""
    inputs = [_Value(v.aval, split) for v, split in zip(jaxpr.invars, splits, strict=True)]
    operations: list[_Operation] = []
    results = _inlined(jaxpr, inputs, operations)
    for operation in operations:
        _set_splits(operation, sizes)
    for operation in reversed(operations):
        _split_backwards(operation, sizes)
    _set_last(operations, results)
    own = _with_sources(operations, results)
    ending: dict[int, int] = {}
    held = peak = 0
    for i, operation in enumerate(operations):
        for value in operation.outputs:
            if value.last > i and value.is_kept and value not in own:
                n_bytes = _n_bytes(value, sizes)
                held += n_bytes
                ending[value.last] = ending.get(value.last, 0) + n_bytes
        peak = max(peak, held + operation.inside)
        held -= ending.pop(i, 0)
    return [value.split for value in results], peak


def _inlined(jaxpr: core.Jaxpr, inputs: list[_Value], found: list[_Operation]) -> list[_Value]:
    """Adds the operations of a function and of all that it calls; gives its results."""
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> _Value:
        if isinstance(atom, core.Literal) or atom not in values:  # A constant.
            return _Value(atom.aval, ((),) * len(getattr(atom.aval, "shape", ())))
        return values[atom]

    for eqn in jaxpr.eqns:
        given = [value_of(atom) for atom in eqn.invars]
        inner: Any = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
        inner = _opened(inner)
        is_call = eqn.primitive.name not in ("scan", "while", "cond")
        if is_call and isinstance(inner, core.Jaxpr) and len(inner.invars) == len(given):
            made = _inlined(inner, given, found)
        else:
            made = [_Value(var.aval) for var in eqn.outvars]
            found.append(_Operation(eqn.primitive.name, eqn.params, given, made))
        values.update(zip(eqn.outvars, made, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _set_last(operations: list[_Operation], results: list[_Value]) -> None:
    """Finds where each value is needed last; what is computed again needs its inputs there."""
    for value in results:
        value.last = len(operations)
    for i, operation in reversed(list(enumerate(operations))):
        needed = max(value.last for value in operation.outputs) if operation.outputs else -1
        if needed < 0:
            continue
        is_cheap, is_view = operation.name in _CHEAP, operation.name in _VIEWS
        is_kept = any(value.is_kept for value in operation.outputs)
        for value in operation.outputs:
            value.is_kept = not is_view and (is_kept or not is_cheap)
        is_again = is_cheap and (is_view or not is_kept) and needed < len(operations)
        for value in operation.inputs:
            value.last = max(value.last, needed if is_again else i)
            if (is_view and is_kept) or not (is_cheap or operation.name in _REDUCTIONS):
                value.is_kept = True


def _with_sources(operations: list[_Operation], results: list[_Value]) -> set[_Value]:
    """The results and what becomes them in place, such as sums before they are divided."""
    own = set(results)
    for operation in reversed(operations):
        if operation.name == "scan":
            carries, _ = _of_scan(operation)
            pairs = zip(operation.inputs[carries], operation.outputs, strict=False)
            own.update(given for given, made in pairs if made in own)
        elif operation.name in _CHEAP and own.intersection(operation.outputs):
            n = math.prod(operation.outputs[0].aval.shape)
            sources = (v for v in operation.inputs if math.prod(getattr(v.aval, "shape", ())) == n)
            own.update(list(sources)[:1])
    return own


def _set_splits(operation: _Operation, sizes: Sizes) -> None:
    given, params = [value.split for value in operation.inputs], operation.params
    match operation.name:
        case "scan":
            carries, n_carry = _of_scan(operation)
            inner = [*given[: carries.stop], *(split[1:] for split in given[carries.stop :])]
            found, operation.inside = _peak(_opened(params["jaxpr"]), inner, sizes)
            splits = [*found[:n_carry], *(((), *split) for split in found[n_carry:])]
        case "while":
            body = given[params["cond_nconsts"] :]
            splits, operation.inside = _peak(_opened(params["body_jaxpr"]), body, sizes)
        case "cond":
            both = [_peak(_opened(branch), given[1:], sizes) for branch in params["branches"]]
            splits, operation.inside = both[0][0], max(peak for _, peak in both)
        case name:
            rule = _RULES.get(name, _alike)
            splits = [rule(operation, out) for out in operation.outputs]
    for value, split in zip(operation.outputs, splits, strict=True):
        value.split = _fitting(split, getattr(value.aval, "shape", ()), sizes)


def _of_scan(operation: _Operation) -> tuple[slice, int]:
    """Which inputs are carried from turn to turn, and how many; by shapes, as names vary."""
    inner: Any = _opened(operation.params["jaxpr"])
    n_carry = sum(
        len(var.aval.shape) == len(value.aval.shape)
        for var, value in zip(inner.outvars, operation.outputs, strict=True)
    )
    n_rows = sum(
        len(var.aval.shape) < len(value.aval.shape)
        for var, value in zip(inner.invars, operation.inputs, strict=True)
    )
    stop = len(operation.inputs) - n_rows
    return slice(stop - n_carry, stop), n_carry


def _opened(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _split_backwards(operation: _Operation, sizes: Sizes) -> None:
    """What is made of nothing, such as random numbers, is split as those who use it are."""
    if operation.name in _RULES or not operation.outputs:
        return
    out = operation.outputs[0]
    for value in operation.inputs:
        shape = getattr(value.aval, "shape", ())
        if shape == getattr(out.aval, "shape", None) and not any(value.split):
            value.split = _fitting(out.split, shape, sizes)


def _fitting(entries: Sequence[tuple[str, ...]], shape: Sequence[int], sizes: Sizes) -> Split:
    used: set[str] = set()
    kept: list[tuple[str, ...]] = []
    for entry, dim in zip(entries, shape, strict=True):
        fits = not used & set(entry) and dim % math.prod(sizes[axis] for axis in entry) == 0
        kept.append(entry if fits else ())
        used |= set(kept[-1])
    return tuple(kept)


def _n_bytes(value: _Value, sizes: Sizes) -> int:
    n_parts = math.prod(sizes[axis] for entry in value.split for axis in entry)
    return math.prod(value.aval.shape) * getattr(value.aval.dtype, "itemsize", 4) // n_parts


def _split(spec: Sequence[Entry], n_dims: int) -> Split:
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return (*entries, *[()] * (n_dims - len(entries)))


def _alike(operation: _Operation, out: _Value) -> Split:
    """A dimension is split as those of its place and size in the inputs are."""
    shape = getattr(out.aval, "shape", ())
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for value in operation.inputs:
        for i, entry in enumerate(value.split[: len(shape)]):
            if entry and not entries[i] and value.aval.shape[i] == shape[i]:
                entries[i] = entry
    return tuple(entries)


def _constraint(operation: _Operation, out: _Value) -> Split:
    return _split(operation.params["sharding"].spec, len(out.aval.shape))


def _dot_general(operation: _Operation, out: _Value) -> Split:
    del out
    contracted, batch = operation.params["dimension_numbers"]
    splits = [value.split for value in operation.inputs]
    entries = [splits[0][i] or splits[1][j] for i, j in zip(*batch, strict=True)]
    for split, gone, shared in zip(splits, contracted, batch, strict=True):
        entries += [e for i, e in enumerate(split) if i not in gone and i not in shared]
    return tuple(entries)


def _transpose(operation: _Operation, out: _Value) -> Split:
    del out
    return tuple(operation.inputs[0].split[i] for i in operation.params["permutation"])


def _broadcast(operation: _Operation, out: _Value) -> Split:
    entries: list[tuple[str, ...]] = [()] * len(out.aval.shape)
    for i, to in enumerate(operation.params["broadcast_dimensions"]):
        entries[to] = operation.inputs[0].split[i]
    return tuple(entries)


def _reduction(operation: _Operation, out: _Value) -> Split:
    del out
    gone = operation.params["axes"]
    return tuple(entry for i, entry in enumerate(operation.inputs[0].split) if i not in gone)


def _reshape(operation: _Operation, out: _Value) -> Split:
    """Dimensions that stay, counted from both ends, are split as they were."""
    (given, *_), new = operation.inputs, out.aval.shape
    old, n = given.aval.shape, min(len(given.aval.shape), len(new))
    entries: list[tuple[str, ...]] = [()] * len(new)
    for places in (range(n), range(-1, -n - 1, -1)):
        for i in places:
            entries[i] = entries[i] or given.split[i]
            if old[i] != new[i]:
                break  # Rows that are put together or taken apart stay on their devices.
    return tuple(entries)


_RULES: dict[str, Callable[[_Operation, _Value], Split]] = {
    "sharding_constraint": _constraint,
    "dot_general": _dot_general,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    **dict.fromkeys(_REDUCTIONS, _reduction),
}
