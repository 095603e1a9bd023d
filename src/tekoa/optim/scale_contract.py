"""Rules for contractions: dense layers, convolutions, einsums, attention.

A kernel's scale undoes the sum over the contracted axes: 1 / (rms of the other operand *
sqrt(number of terms)). The result is carried on at unit rms, as in a trained network, so
that later layers see inputs of the scale they will have.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from tekoa.optim import scale_bags, scale_consume, scale_uses, scale_values
from tekoa.optim.scale_reader import Reader, Rule
from tekoa.optim.scale_uses import Use
from tekoa.optim.scale_values import Bag, Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
    """What a contraction does with each axis of an operand."""

    batch: tuple[int, ...] = ()  # Goes through: members of an ensemble, experts.
    contracted: tuple[int, ...] = ()
    free: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The axes in the order in which a kernel's entries are drawn."""
        return self.batch + self.contracted + self.free


def dot_general(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A dense layer or an einsum; of data with data, attention."""
    return _dot(reader, eqn, inputs, eqn.params["dimension_numbers"])


def ragged_dot(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A dense layer whose rows each meet the kernel of their group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return _dot(reader, eqn, inputs, numbers)


def _dot(reader: Reader, eqn: Any, inputs: list[Value], numbers: Any) -> list[Value]:
    axes = []
    for value, contracted, batch in zip(inputs, *numbers):
        taken = {*contracted, *batch}
        free = tuple(i for i in range(len(value.shape)) if i not in taken)
        axes.append(_Axes(batch=tuple(batch), contracted=tuple(contracted), free=free))
    if not any(value.views for value in inputs):
        return _average(reader, eqn, inputs, axes)
    if not axes[0].contracted:
        return scale_consume.multiply(reader, eqn, inputs)
    n_terms = math.prod(inputs[0].shape[i] for i in axes[0].contracted)
    return _contract(reader, eqn, inputs, axes, n_terms)


def conv(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A convolution: a contraction over the window and the input features."""
    if not inputs[1].views:
        reader.note(inputs, "convolved as an input, for which there is no rule")
        return reader.plain(eqn, inputs)
    out_axis, in_axis, *spatial = eqn.params["dimension_numbers"].rhs_spec
    kernel = _Axes(contracted=(*spatial, in_axis), free=(out_axis,))
    return _contract(reader, eqn, inputs, [_Axes(), kernel], scale_bags.conv_terms(eqn))


def _contract(
    reader: Reader, eqn: Any, inputs: list[Value], axes: list[_Axes], n_terms: float
) -> list[Value]:
    """Records a contraction of a kernel with data, or of two parameters."""
    data, rms = [value.data for value in inputs], 1.0
    source = tuple(view.param for value in inputs for view in value.views)
    if inputs[0].views and inputs[1].views:
        for value, of in zip(inputs, axes):
            use = Use(kind=scale_uses.PAIRED, n_terms=n_terms)
            _record(reader, value, of, use, 1.0)
    else:
        kernel = int(not inputs[0].views)
        rms = _record_kernel(reader, inputs, axes, kernel, n_terms)
    if any(isinstance(x, Bag) for x in data):
        unit = scale_values.unit_bag(eqn.outvars[0].aval.dtype, reader.rng())
        (out,) = reader.outputs(eqn, inputs, [unit])
        return [dataclasses.replace(_to_rms(out, rms), source=source)]
    for i, (value, of) in enumerate(zip(inputs, axes)):
        if value.views:
            data[i] = reader.normal(value, of.order, n_batch=len(of.batch))
    # A convolution meets blank stretches of an image, which do count.
    is_dot = bool(axes[0].contracted)
    (out,) = reader.plain(eqn, inputs, data)
    return [dataclasses.replace(_to_rms(out, rms, skip_zeros=is_dot), source=source)]


def _record_kernel(
    reader: Reader, inputs: list[Value], axes: list[_Axes], kernel: int, n_terms: float
) -> float:
    """Records the use of a kernel with data; gives the rms that the result will have."""
    other, along = inputs[1 - kernel].data, axes[1 - kernel].contracted
    if along and scale_bags.is_one_hot(other, along, n_terms):
        for view in inputs[kernel].views:
            reduced = view.param_axes(axes[kernel].free)
            use = Use(kind=scale_uses.LOOKED_UP, reduced=reduced, detail="by one-hot")
            reader.ledger.record(view, use)
        return reader.known.get(inputs[kernel].views[0].param, 1.0)
    ms = scale_values.mean_square(other)
    if along and not isinstance(other, Bag):
        # Rows of padding, or meant for other experts, tell nothing about this kernel.
        rows = scale_values.mean_square(other, along)
        ms = float(np.mean(rows[rows > 0])) if np.any(rows > 0) else 0.0
    params = [view.param for view in inputs[kernel].views]
    reader.ledger.fed_by |= dict.fromkeys(params, inputs[1 - kernel].source)
    target = reader.targets.get(params[0], 1.0)
    detail = "" if target == 1 else f"for a result of rms {target:.3g}, that of a tied embedding"
    use = Use(kind=scale_uses.CONTRACTED, n_terms=n_terms, target=target, detail=detail)
    _record(reader, inputs[kernel], axes[kernel], use, ms)
    return target


def _record(reader: Reader, value: Value, axes: _Axes, use: Use, ms: float) -> None:
    """Records a contraction for each parameter in a kernel, over that parameter's own axes."""
    for view in value.views:
        reduced = view.param_axes(axes.contracted)
        n_terms = use.n_terms * view.n_shards(reduced)
        own = dataclasses.replace(use, reduced=reduced, n_terms=n_terms)
        reader.ledger.record(view, own, ms)


def _average(reader: Reader, eqn: Any, inputs: list[Value], axes: list[_Axes]) -> list[Value]:
    """A contraction of data with data; a weighted mean keeps the scale of what it averages."""
    (out,) = reader.plain(eqn, inputs)
    if isinstance(out.data, Bag) or not axes[0].contracted:
        return [out]
    n_terms = math.prod(inputs[0].shape[i] for i in axes[0].contracted)
    for i, (value, of) in enumerate(zip(inputs, axes)):
        picks = scale_bags.is_one_hot(value.data, of.contracted, n_terms)
        weighs = value.from_batch and scale_bags.is_average(value.data, of.contracted, n_terms)
        if weighs and not picks:
            return [_to_rms(out, math.sqrt(scale_values.mean_square(inputs[1 - i].data)))]
    return [out]


def reduce_sum(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Multiplying by a parameter and summing over its axes is a contraction, too."""
    (out,) = reader.plain(eqn, inputs)
    (value,), axes = inputs, eqn.params["axes"]
    if value.views:
        reader.note(inputs, "used by 'reduce_sum', for which there is no rule")
    # A sum over everything is a loss, not a layer.
    if value.product is None or len(axes) == len(value.shape):
        return [out]
    view, ms = value.product
    if any(not view.param_axes((axis,)) for axis in axes):
        return [out]
    n_terms = math.prod(value.shape[axis] for axis in axes)
    use = Use(kind=scale_uses.CONTRACTED, reduced=view.param_axes(axes), n_terms=n_terms)
    reader.ledger.record(view, use, ms)
    return [_to_rms(out, 1.0)]


def _to_rms(value: Value, rms: float, *, skip_zeros: bool = False) -> Value:
    """Rescales a value, as a kernel of the right scale would."""
    x = value.data.samples if isinstance(value.data, Bag) else value.data
    counted = np.asarray(x)[np.asarray(x) != 0] if skip_zeros else x
    factor = rms / (math.sqrt(scale_values.mean_square(counted)) or 1.0)
    x = x * np.asarray(factor, x.dtype)
    return dataclasses.replace(value, data=Bag(x) if isinstance(value.data, Bag) else x)


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot,
    "conv_general_dilated": conv,
    "reduce_sum": reduce_sum,
}
