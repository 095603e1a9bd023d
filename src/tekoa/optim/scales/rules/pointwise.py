"""Rules for uses other than contractions: biases, gains, embeddings, tokens.

Each rule records the kind of use. The interpreter then continues with a result as in a
trained network: a bias adds nothing to the rms, a gain is 1, a row of an embedding has the
embedding's scale.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tekoa.optim.scales import roles, uses, values
from tekoa.optim.scales.interpreter import Reader, Rule, views_of, with_views
from tekoa.optim.scales.rules import moves
from tekoa.optim.scales.uses import Use, UseKind
from tekoa.optim.scales.values import Samples, Value
from tekoa.optim.scales.views import NEW, View


def add(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles a sum: with data the parameter is a bias, with a constant it gets an offset."""
    views = views_of(inputs)
    data = [value for value in inputs if not value.views]
    if not data or (data[0].is_weight and not _is_broadcast(eqn, views)):
        (out,) = reader.plain(eqn, inputs)
        return [with_views(out, views)]
    ms = values.mean_square(data[0].data)
    if _is_constant(data[0]):
        (out,) = reader.plain(eqn, inputs)
        return [with_views(out, [view.shifted(math.sqrt(ms)) for view in views])]
    return _used_with_data(reader, eqn, inputs, uses.ADDED, ms or 1.0, fill=0)


def multiply(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles a product: with data the parameter is a gain, by a constant it is rescaled."""
    name, views = eqn.primitive.name, views_of(inputs)
    data = [value for value in inputs if not value.views]
    if not data:
        return _multiply_params(reader, eqn, inputs)
    if name == "div" and inputs[1].views and _is_constant(data[0]):
        return argument(reader, eqn, inputs)
    ms = values.mean_square(data[0].data)
    if _is_constant(data[0]) and ms == 0:
        return reader.plain(eqn, inputs)  # The zero state at the first step of a loop.
    if _is_constant(data[0]) or (data[0].is_weight and not _is_broadcast(eqn, views)):
        (out,) = reader.plain(eqn, inputs)
        factor = (math.sqrt(ms) or 1.0) ** (-1 if name == "div" else 1)
        return [with_views(out, [view.scaled(factor) for view in views])]
    offset = max(view.offset for view in views)
    kind, gain = (uses.MULTIPLIED_SUM, offset) if offset else (uses.MULTIPLIED, 1.0)
    (out,) = _used_with_data(reader, eqn, inputs, kind, gain**2, fill=gain)
    product = (views[0], ms, data[0].uses) if name == "mul" else None
    return [dataclasses.replace(out, product=product)]


def _multiply_params(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Multiplies two parameters: the smaller one is a gain of the larger one."""
    if {view.param for view in inputs[0].views} & {view.param for view in inputs[1].views}:
        reader.note(inputs, "used as its square, for which there is no rule")
        return reader.plain(eqn, inputs)
    sizes = [sum(map(_n_entries, value.views)) for value in inputs]
    gain = int(sizes[1] <= sizes[0])
    _record(reader, [inputs[gain]], uses.MULTIPLIED)
    data = [value.data for value in inputs]
    data[gain] = _fill(inputs[gain], 1)
    (out,) = reader.plain(eqn, inputs, data)
    return [with_views(out, inputs[1 - gain].views)]


def beside(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles entries placed beside data: class tokens, mask tokens, lower bounds."""
    if not any(value.from_batch for value in inputs):
        return moves.join(reader, eqn, inputs)
    others = [v for v in inputs if not v.views and jnp.issubdtype(v.dtype, jnp.inexact)]
    sizes = [math.prod(value.shape) for value in others]
    total = sum(values.mean_square(v.data) * n for v, n in zip(others, sizes))
    ms = total / max(sum(sizes), 1) or 1.0
    _record(reader, inputs, uses.JOINED, ms)
    rms = math.sqrt(ms)
    data = [_draw(reader, value, rms) if value.views else value.data for value in inputs]
    return reader.plain(eqn, inputs, data)


def look_up(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles an embedding: the batch selects its rows."""
    table, indices = inputs[0], inputs[1:]
    if not table.views:
        reader.note(inputs, f"used as an index by {eqn.primitive.name!r}")
        return reader.plain(eqn, inputs)
    if eqn.primitive.name == "dynamic_slice" and not any(i.from_batch for i in indices):
        return moves.dynamic_slice(reader, eqn, inputs)
    sizes = eqn.params["slice_sizes"]
    features = [i for i, (n, size) in enumerate(zip(table.shape, sizes)) if size >= n]
    rms = reader.tied_scales.get(table.views[0].param, 1.0)
    selected = [i for i in range(len(sizes)) if i not in features]
    for view in table.views:
        role = roles.role_of_view(view, "looked up", contracted=selected)
        reduced = view.param_axes(features)
        target = reader.targets.get(view.param, 1.0)
        detail = "by row" if target == 1 else "by row, beside a tied embedding"
        use = Use(kind=uses.LOOKED_UP, reduced=reduced, target=target, detail=detail, role=role)
        reader.lookups[view.param] = use
    rows = _draw(reader, table, rms)
    (out,) = reader.plain(eqn, inputs, [rows, *(value.data for value in indices)])
    source = tuple(view.param for view in table.views)
    gathered = tuple(_view_of_rows(eqn, view, features, out.shape) for view in table.views)
    return [dataclasses.replace(out, source=source, gathered=gathered)]


def _view_of_rows(eqn: Any, table: View, features: Sequence[int], shape: tuple[int, ...]) -> View:
    """Locates the axes of a table in rows of it; their number lies along the selected axis."""
    selected = [p[0] for i in range(len(table.axes)) if i not in features for p in table.axes[i]]
    number = selected[0] if selected else NEW
    offsets, table_axes = range(len(shape)), list(range(len(shape)))
    if eqn.primitive.name == "gather":
        numbers = eqn.params["dimension_numbers"]
        dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        offsets, table_axes = (
            numbers.offset_dims,
            [i for i in range(len(table.axes)) if i not in dropped],
        )
    axis_of = {out: i for out, i in zip(offsets, table_axes, strict=True) if i in features}
    return dataclasses.replace(
        table,
        axes=tuple(
            table.axes[axis_of[out]] if out in axis_of else ((number, n),)
            for out, n in enumerate(shape)
        ),
    )


def argument(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles a function of a parameter alone, like exp(log_scale): its scale is 1."""
    _record(reader, inputs, uses.ARGUMENT, detail=f"of {eqn.primitive.name!r}")
    return reader.plain(eqn, inputs)


def _used_with_data(
    reader: Reader, eqn: Any, inputs: list[Value], kind: UseKind, ms: float, *, fill: float
) -> list[Value]:
    """Records the use of each parameter and computes with `fill` in its place."""
    _record(reader, inputs, kind, ms)
    data = [_fill(value, fill) if value.views else value.data for value in inputs]
    return reader.plain(eqn, inputs, data)


def _record(
    reader: Reader, inputs: list[Value], kind: UseKind, ms: float = 1.0, detail: str = ""
) -> None:
    for view in views_of(inputs):
        role = roles.role_of_view(view, kind.role)
        use = Use(kind=kind, reduced=_reduced_axes(view), detail=detail, role=role)
        reader.record.add(view, use, ms)


def _fill(value: Value, fill: float) -> Any:
    if isinstance(value.data, Samples):
        return Samples(np.full_like(value.data.samples, fill))
    return np.full(value.shape, fill, value.dtype)


def _draw(reader: Reader, value: Value, rms: float) -> Any:
    """Draws entries of this rms in place of a parameter."""
    if isinstance(value.data, Samples):
        unit = values.unit_samples(value.dtype, reader.rng())
        return Samples((unit.samples * rms).astype(value.dtype))
    return (reader.normal(value, range(len(value.shape))) * rms).astype(value.dtype)


def _reduced_axes(view: View) -> frozenset[int]:
    """Returns the axes to average over in uses other than contractions: all but the first.

    Heads, positions and ensemble members then have separate slots. A single axis is averaged.
    """
    axes = sorted(view.param_axes(range(len(view.axes))))
    return frozenset(axes[1:] if len(axes) > 1 else axes)


def _is_constant(value: Value) -> bool:
    return not value.from_params and not value.from_batch


def _is_broadcast(eqn: Any, views: Sequence[View]) -> bool:
    """Whether the result repeats entries of a parameter, as activations do."""
    size = math.prod(eqn.outvars[0].aval.shape)
    return any(_n_entries(view) < size for view in views)


def _n_entries(view: View) -> int:
    return math.prod(n for pieces in view.axes for axis, n in pieces if axis != NEW)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["add", "add_any", "sub"], add),
    **dict.fromkeys(["mul", "div"], multiply),
    **dict.fromkeys(["concatenate", "dynamic_update_slice", "select_n"], beside),
    **dict.fromkeys(["max", "min", "clamp"], beside),
    **dict.fromkeys(["gather", "dynamic_slice"], look_up),
    **dict.fromkeys(["exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh"], argument),
    **dict.fromkeys(["sin", "cos", "erf", "sqrt", "rsqrt", "cbrt"], argument),
}
