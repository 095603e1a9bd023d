"""Rules for contractions: dense layers, convolutions, einsums, attention.

A kernel's scale undoes the sum over the contracted axes: 1 / (rms of the other operand *
sqrt(number of terms)). The result is carried on at unit rms, as in a trained network, so
that later layers see inputs of the scale they will have.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tekoa.optim import scale_bags, scale_consume, scale_uses, scale_values
from tekoa.optim.scale_reader import Reader, Rule
from tekoa.optim.scale_uses import Use
from tekoa.optim.scale_values import Bag, Value


def dot_general(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A contraction: the kernel's scale undoes the sum over the contracted axes."""
    contracting, batch = eqn.params["dimension_numbers"]
    return _contract(reader, eqn, inputs, list(zip(contracting, batch)))


def ragged_dot(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A contraction whose rows each meet the kernel of their group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    contracting, batch = numbers
    if not any(value.views for value in inputs):
        return reader.plain(eqn, inputs)
    return _contract(reader, eqn, inputs, list(zip(contracting, batch)))


def _contract(
    reader: Reader, eqn: Any, inputs: list[Value], axes: list[tuple[Sequence[int], Sequence[int]]]
) -> list[Value]:
    operands = inputs[:2]
    if not any(value.views for value in operands):
        return _average(reader, eqn, inputs, [contracted for contracted, _ in axes])
    if not axes[0][0]:
        return scale_consume.multiply(reader, eqn, inputs)
    orders = [_kernel_order(len(v.shape), c, b) for v, (c, b) in zip(operands, axes)]
    n_terms = math.prod(operands[0].shape[i] for i in axes[0][0])
    contracted = [contracted for contracted, _ in axes]
    n_batch = len(axes[0][1])
    return _consume_kernel(reader, eqn, inputs, contracted, orders, n_terms, n_batch)


def conv(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A convolution: a contraction over the window and the input features."""
    if not inputs[1].views:
        reader.note(inputs, "convolved as an input, for which there is no rule")
        return reader.plain(eqn, inputs)
    out_axis, in_axis, *spatial = eqn.params["dimension_numbers"].rhs_spec
    order = (*spatial, in_axis, out_axis)
    contracted = [(), order[:-1]]
    n_terms = scale_bags.conv_terms(eqn)
    return _consume_kernel(reader, eqn, inputs, contracted, [(), order], n_terms, 0)


def _consume_kernel(
    reader: Reader,
    eqn: Any,
    inputs: list[Value],
    contracted: Sequence[Sequence[int]],
    orders: Sequence[Sequence[int]],
    n_terms: float,
    n_batch: int,
) -> list[Value]:
    paired = all(value.views for value in inputs[:2])
    data = [value.data for value in inputs]
    for i, value in enumerate(inputs[:2]):
        if not value.views:
            continue
        ms = 1.0 if paired else scale_values.mean_square(data[1 - i])
        if ms == 0 and isinstance(data[1 - i], Bag):
            ms = 1 / n_terms  # So sparse that no sample is set: one of all the terms, one-hot.
        for view in value.views:
            reduced = view.param_axes(contracted[i])
            n = n_terms * view.n_shards(reduced)
            kind = scale_uses.PAIRED if paired else scale_uses.CONTRACTED
            reader.ledger.record(view, Use(kind=kind, reduced=reduced, n_terms=n), ms)
    if any(isinstance(x, Bag) for x in data):
        unit = scale_values.unit_bag(eqn.outvars[0].aval.dtype, reader.rng())
        return reader.outputs(eqn, inputs, [unit])
    for i, value in enumerate(inputs[:2]):
        if value.views:
            data[i] = reader.normal(value, orders[i])
    (out,) = reader.plain(eqn, inputs, data)
    return [_to_unit(out, tuple(range(n_batch, len(out.shape))))]


def _average(
    reader: Reader, eqn: Any, inputs: list[Value], contracted: Sequence[Sequence[int]]
) -> list[Value]:
    """A contraction of data with data; a weighted mean keeps the scale of what it averages."""
    (out,) = reader.plain(eqn, inputs)
    if isinstance(out.data, Bag) or not contracted[0]:
        return [out]
    n_terms = math.prod(inputs[0].shape[i] for i in contracted[0])
    for i, value in enumerate(inputs):
        if value.from_batch and scale_bags.is_average(value.data, tuple(contracted[i]), n_terms):
            rms = math.sqrt(scale_values.mean_square(inputs[1 - i].data))
            return [_to_unit(out, tuple(range(len(out.shape))), rms)]
    return [out]


def reduce_sum(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Multiplying by a parameter and summing over its axes is a contraction, too."""
    (out,) = reader.plain(eqn, inputs)
    (value,), axes = inputs, eqn.params["axes"]
    if value.views:
        reader.note(inputs, "used by 'reduce_sum', for which there is no rule")
    if value.product is None or isinstance(out.data, Bag) or len(axes) == len(value.shape):
        return [out]
    view, ms = value.product
    if any(not view.param_axes((axis,)) for axis in axes):
        return [out]
    n_terms = math.prod(value.shape[axis] for axis in axes)
    use = Use(kind=scale_uses.CONTRACTED, reduced=view.param_axes(axes), n_terms=n_terms)
    reader.ledger.record(view, use, ms)
    return [_to_unit(out, tuple(range(len(out.shape))))]


def _to_unit(value: Value, axes: tuple[int, ...], rms: float = 1.0) -> Value:
    ms = scale_values.mean_square(value.data, axes)
    factor = rms / np.sqrt(np.where(ms > 0, ms, 1.0))
    return dataclasses.replace(value, data=(value.data * factor.astype(np.float32)).astype(value.dtype))


def _kernel_order(ndim: int, contracted: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    free = [i for i in range(ndim) if i not in contracted and i not in batch]
    return (*batch, *contracted, *free)


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot,
    "conv_general_dilated": conv,
    "reduce_sum": reduce_sum,
}
