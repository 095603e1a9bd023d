"""Rules for operations that use a parameter: each decides what kind of use it is.

After the use the result is carried on as a trained network would have it: a bias adds
nothing to its rms, a gain is 1, a row of an embedding has the embedding's scale.
Contractions have a file of their own.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tekoa.optim import scale_moves, scale_uses, scale_values
from tekoa.optim.scale_reader import Reader, Rule, with_views
from tekoa.optim.scale_uses import Kind, Use
from tekoa.optim.scale_values import Bag, Value
from tekoa.optim.scale_views import NEW, View


def add(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A bias, where data is added; else the parameter only gets an offset."""
    views = [view for value in inputs for view in value.views]
    data = [value for value in inputs if not value.views]
    if not data or (_is_weight(data[0]) and not _is_broadcast(eqn, views)):
        (out,) = reader.plain(eqn, inputs)
        return [with_views(out, views)]
    ms = scale_values.mean_square(data[0].data)
    if _is_constant(data[0]):
        (out,) = reader.plain(eqn, inputs)
        return [with_views(out, [view.shifted(math.sqrt(ms)) for view in views])]
    return _used_with_data(reader, eqn, inputs, scale_uses.ADDED, ms or 1.0, fill=0)


def multiply(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A gain, where data is multiplied; with a constant, the parameter rescaled."""
    is_product = eqn.primitive.name == "mul"
    views = [view for value in inputs for view in value.views]
    data = [value for value in inputs if not value.views]
    if not data:
        return _multiply_params(reader, eqn, inputs)
    if eqn.primitive.name == "div" and inputs[1].views and _is_constant(data[0]):
        return argument(reader, eqn, inputs)
    ms = scale_values.mean_square(data[0].data)
    if _is_constant(data[0]) and ms == 0:
        return reader.plain(eqn, inputs)  # The zero state before the first step of a loop.
    if _is_constant(data[0]) or (_is_weight(data[0]) and not _is_broadcast(eqn, views)):
        (out,) = reader.plain(eqn, inputs)
        factor = (math.sqrt(ms) or 1.0) ** (-1 if eqn.primitive.name == "div" else 1)
        return [with_views(out, [view.scaled(factor) for view in views])]
    (out,) = _multiply_data(reader, eqn, inputs)
    return [dataclasses.replace(out, product=(views[0], ms) if is_product else None)]


def _multiply_data(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    views = [view for value in inputs for view in value.views]
    offset = max(view.offset for view in views)
    if offset:
        return _used_with_data(
            reader, eqn, inputs, scale_uses.MULTIPLIED_SUM, offset**2, fill=offset
        )
    return _used_with_data(reader, eqn, inputs, scale_uses.MULTIPLIED, 1.0, fill=1)


def _multiply_params(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Of two parameters the smaller is a gain of the larger."""
    if {view.param for view in inputs[0].views} & {view.param for view in inputs[1].views}:
        reader.note(inputs, "used by its square, for which there is no rule")
        return reader.plain(eqn, inputs)
    sizes = [sum(map(_n_entries, value.views)) for value in inputs]
    gain = int(sizes[1] <= sizes[0])
    for view in inputs[gain].views:
        reader.ledger.record(view, Use(kind=scale_uses.MULTIPLIED, reduced=_visible(view)))
    data = [value.data for value in inputs]
    data[gain] = _filled(inputs[gain], 1)
    (out,) = reader.plain(eqn, inputs, data)
    return [with_views(out, inputs[1 - gain].views)]


def beside(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Entries that stand beside data: a class token, a mask token, a floor."""
    if not any(value.from_batch for value in inputs):
        return scale_moves.join(reader, eqn, inputs)
    others = [v for v in inputs if not v.views and jnp.issubdtype(v.dtype, jnp.inexact)]
    sizes = [math.prod(value.shape) for value in others]
    total = sum(scale_values.mean_square(v.data) * n for v, n in zip(others, sizes))
    ms = total / max(sum(sizes), 1) or 1.0
    for view in (view for value in inputs for view in value.views):
        reader.ledger.record(view, Use(kind=scale_uses.JOINED, reduced=_visible(view)), ms)
    data = [
        _unit(reader, value, range(len(value.shape)), math.sqrt(ms)) if value.views else value.data
        for value in inputs
    ]
    return reader.plain(eqn, inputs, data)


def look_up(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """An embedding: rows are picked by the batch."""
    table, indices = inputs[0], inputs[1:]
    if not table.views:
        reader.note(inputs, f"used as an index by {eqn.primitive.name!r}")
        return reader.plain(eqn, inputs)
    if eqn.primitive.name == "dynamic_slice" and not any(i.from_batch for i in indices):
        return scale_moves.dynamic_slice(reader, eqn, inputs)
    sizes = eqn.params["slice_sizes"]
    picked = [i for i, (n, size) in enumerate(zip(table.shape, sizes)) if size < n]
    features = [i for i in range(len(table.shape)) if i not in picked]
    known = reader.known.get(table.views[0].param, 1.0)
    for view in table.views:
        use = Use(kind=scale_uses.LOOKED_UP, reduced=view.param_axes(features), detail="by row")
        reader.ledger.record(view, use)
    rows = _unit(reader, table, range(len(table.shape)), known)
    (out,) = reader.plain(eqn, inputs, [rows, *(value.data for value in indices)])
    return [dataclasses.replace(out, source=tuple(view.param for view in table.views))]


def argument(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A function of a parameter alone, as in exp(log_scale): its natural unit is 1."""
    for view in (view for value in inputs for view in value.views):
        use = Use(
            kind=scale_uses.ARGUMENT, reduced=_visible(view), detail=f"of {eqn.primitive.name!r}"
        )
        reader.ledger.record(view, use)
    return reader.plain(eqn, inputs)


def _used_with_data(
    reader: Reader, eqn: Any, inputs: list[Value], kind: Kind, ms: float, *, fill: float
) -> list[Value]:
    """Records the use of each parameter, and goes on with `fill` in its place."""
    for view in (view for value in inputs for view in value.views):
        reader.ledger.record(view, Use(kind=kind, reduced=_visible(view)), ms)
    data = [_filled(value, fill) if value.views else value.data for value in inputs]
    return reader.plain(eqn, inputs, data)


def _filled(value: Value, fill: float) -> Any:
    if isinstance(value.data, Bag):
        return Bag(np.full_like(value.data.samples, fill))
    return jnp.full(value.shape, fill, value.dtype)


def _unit(reader: Reader, value: Value, order: Sequence[int], rms: float) -> Any:
    if isinstance(value.data, Bag):
        unit = scale_values.unit_bag(value.dtype, reader.rng())
        return Bag((unit.samples * rms).astype(value.dtype))
    return (reader.normal(value, tuple(order)) * rms).astype(value.dtype)


def _visible(view: View) -> frozenset[int]:
    """The axes to average over for what is not contracted: of several, the first is kept.

    So heads, positions and members of an ensemble each have their own slot.
    """
    axes = sorted(view.param_axes(range(len(view.axes))))
    return frozenset(axes[1:] if len(axes) > 1 else axes)


def _is_weight(value: Value) -> bool:
    return value.from_params and not value.from_batch


def _is_constant(value: Value) -> bool:
    return not value.from_params and not value.from_batch


def _is_broadcast(eqn: Any, views: Sequence[View]) -> bool:
    """Whether the result holds entries of a parameter more than once, as activations do."""
    size = math.prod(eqn.outvars[0].aval.shape)
    return any(_n_entries(view) < size for view in views)


def _n_entries(view: View) -> int:
    return math.prod(n for pieces in view.axes for axis, n in pieces if axis != NEW)


RULES: dict[str, Rule] = {
    "add": add,
    "add_any": add,
    "sub": add,
    "mul": multiply,
    "div": multiply,
    "concatenate": beside,
    "select_n": beside,
    "max": beside,
    "min": beside,
    "clamp": beside,
    "dynamic_update_slice": beside,
    "gather": look_up,
    "dynamic_slice": look_up,
    "exp": argument,
    "exp2": argument,
    "expm1": argument,
    "log": argument,
    "log1p": argument,
    "logistic": argument,
    "tanh": argument,
    "sin": argument,
    "cos": argument,
    "erf": argument,
    "sqrt": argument,
    "rsqrt": argument,
    "cbrt": argument,
}
