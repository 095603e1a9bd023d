"""Rules for contractions: dense layers, convolutions, einsums, attention.

A kernel's scale is 1 / (rms of the other operand * sqrt(number of terms)), which gives the
result unit rms. The interpreter continues with a result of that rms, as in a trained network,
so that later layers see inputs of the scale they will have.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from tekoa.optim.scales import roles, uses, values
from tekoa.optim.scales.interpreter import Reader, Rule, views_of, with_views
from tekoa.optim.scales.rules import pointwise, samples
from tekoa.optim.scales.uses import Use
from tekoa.optim.scales.values import Samples, Value
from tekoa.optim.scales.views import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
    """The roles of an operand's axes in a contraction."""

    batch: tuple[int, ...] = ()  # In both operands and the result: ensemble members, experts.
    contracted: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    groups: tuple[int, int] | None = None  # An axis, and the number of kernels along it.

    @property
    def order(self) -> tuple[int, ...]:
        """All axes, in the order in which a kernel's entries are drawn."""
        return self.batch + self.contracted + self.free


def dot_general(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles a dense layer or an einsum, possibly with a kernel per group; also attention."""
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        numbers = eqn.params["dimension_numbers"]
    axes = []
    for value, contracted, batch in zip(inputs, *numbers):
        free = tuple(i for i in range(len(value.shape)) if i not in {*contracted, *batch})
        axes.append(_Axes(batch=tuple(batch), contracted=tuple(contracted), free=free))
    if any(value.gathered for value in inputs):
        if _are_kernels(reader, inputs, axes):
            return _contract_rows(reader, eqn, inputs, axes)
        inputs = [reader.settle(value) for value in inputs]
    if not any(value.views for value in inputs):
        if [value.is_weight for value in inputs].count(True) == 1:
            data, weight = sorted(inputs, key=lambda value: value.is_weight)
            reader.record.add_weight(weight.uses, data.uses)
        return _average(reader, eqn, inputs, axes)
    if not axes[0].contracted:
        return pointwise.multiply(reader, eqn, inputs)
    n_terms = math.prod(inputs[0].shape[i] for i in axes[0].contracted)
    return _contract(reader, eqn, inputs, axes, n_terms)


def conv(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles a convolution: a contraction over the window and the input features."""
    if not inputs[1].views:
        reader.note(inputs, "convolved as the input, for which there is no rule")
        if inputs[1].is_weight:
            reader.record.add_weight(inputs[1].uses, inputs[0].uses)
        return reader.plain(eqn, inputs)
    out_axis, in_axis, *spatial = eqn.params["dimension_numbers"].rhs_spec
    groups = out_axis, eqn.params["feature_group_count"]
    kernel = _Axes(contracted=(*spatial, in_axis), free=(out_axis,), groups=groups)
    return _contract(reader, eqn, inputs, [_Axes(), kernel], samples.conv_terms(eqn))


def _contract(
    reader: Reader, eqn: Any, inputs: list[Value], axes: list[_Axes], n_terms: float
) -> list[Value]:
    """Records and computes a contraction of a kernel with data, or of two parameters."""
    data, rms = [value.data for value in inputs], 1.0
    source = tuple(view.param for view in views_of(inputs))
    if inputs[0].views and inputs[1].views:
        for value, value_axes in zip(inputs, axes):
            use = Use(kind=uses.PAIRED, n_terms=n_terms)
            _record(reader, value, value_axes, use, 1.0, data_uses=0)
    else:
        rms = _record_kernel(reader, inputs, axes, n_terms)
    if any(isinstance(x, Samples) for x in data):
        unit = values.unit_samples(eqn.outvars[0].aval.dtype, reader.rng())
        (out,) = reader.outputs(eqn, inputs, [unit])
        return [dataclasses.replace(_to_rms(out, rms), source=source)]
    for i, (value, value_axes) in enumerate(zip(inputs, axes)):
        if value.views:
            data[i] = reader.normal(value, value_axes.order, n_batch=len(value_axes.batch))
    (out,) = reader.plain(eqn, inputs, data)
    # The zeros of a convolution are blank areas of images, which do count.
    out = _to_rms(out, rms, skip_zeros=bool(axes[0].contracted))
    return [dataclasses.replace(out, source=source)]


def _record_kernel(reader: Reader, inputs: list[Value], axes: list[_Axes], n_terms: float) -> float:
    """Records the use of a kernel with data and returns the rms of the result."""
    kernel = int(not inputs[0].views)
    data_uses = inputs[1 - kernel].uses
    reader.record.followed |= data_uses
    other, along = inputs[1 - kernel].data, axes[1 - kernel].contracted
    if along and samples.is_one_hot(other, along, n_terms):
        for view in inputs[kernel].views:
            use = Use(
                kind=uses.LOOKED_UP,
                reduced=view.param_axes(axes[kernel].free),
                detail="by one-hot",
                role=_role(view, "looked up", axes[kernel]),
            )
            reader.record.add(view, use, data_uses=data_uses)
        return reader.tied_scales.get(inputs[kernel].views[0].param, 1.0)
    ms = values.mean_square(other)
    if along and not isinstance(other, Samples):
        # Zero rows are padding or belong to other experts: they do not count for this kernel.
        rows = values.mean_square(other, along)
        ms = float(np.mean(rows[rows > 0])) if np.any(rows > 0) else 0.0
    params = [view.param for view in inputs[kernel].views]
    reader.record.fed_by |= dict.fromkeys(params, inputs[1 - kernel].source)
    target = reader.targets.get(params[0], 1.0)
    detail = "" if target == 1 else f"for a result of rms {target:.3g}, that of a tied embedding"
    use = Use(kind=uses.CONTRACTED, n_terms=n_terms, target=target, detail=detail)
    _record(reader, inputs[kernel], axes[kernel], use, ms, data_uses)
    return target


def _record(reader: Reader, value: Value, axes: _Axes, use: Use, ms: float, data_uses: int) -> None:
    """Records a contraction for each parameter in a kernel, in terms of its own axes."""
    for view in value.views:
        reduced = view.param_axes(axes.contracted)
        n_terms = use.n_terms * view.n_shards(reduced)
        role = _role(view, use.kind.role, axes)
        full_use = dataclasses.replace(use, reduced=reduced, n_terms=n_terms, role=role)
        reader.record.add(view, full_use, ms, data_uses)


def _role(view: View, kind: roles.Kind, axes: _Axes) -> roles.Role:
    return roles.role_of_view(
        view, kind, contracted=axes.contracted, batched=axes.batch, groups=axes.groups
    )


def _are_kernels(reader: Reader, inputs: list[Value], axes: list[_Axes]) -> bool:
    """Whether rows that the batch has selected are contracted as kernels, as those of experts.

    They are if their features are summed over. Otherwise they are data: attention averages
    rows, a dense layer is applied to them, and their norm is a contraction with themselves.
    """
    params = [{view.param for view in value.gathered} for value in inputs]
    if any(value.views or value.is_weight for value in inputs) or params[0] & params[1]:
        return False
    return bool(axes[0].contracted) and all(
        not view.param_axes(value_axes.contracted) & set(reader.lookups[view.param].role.contracted)
        for value, value_axes in zip(inputs, axes)
        for view in value.gathered
    )


def _contract_rows(reader: Reader, eqn: Any, inputs: list[Value], axes: list[_Axes]) -> list[Value]:
    """Contracts kernels that the batch has selected: experts by index, sampled outputs."""
    n_terms = math.prod(inputs[0].shape[i] for i in axes[0].contracted)
    is_paired = all(value.gathered for value in inputs)
    kind = uses.PAIRED if is_paired else uses.CONTRACTED
    for value, other, value_axes in zip(inputs, inputs[::-1], axes):
        if value.gathered:
            data_uses = 0 if is_paired else other.uses
            reader.record.followed |= data_uses
            ms = values.mean_square(other.data)
            as_views = with_views(value, value.gathered)
            use = Use(kind=kind, n_terms=n_terms)
            _record(reader, as_views, value_axes, use, ms, data_uses)
    (out,) = reader.plain(eqn, inputs)
    return [_to_rms(out, 1.0)]


def _average(reader: Reader, eqn: Any, inputs: list[Value], axes: list[_Axes]) -> list[Value]:
    """Contracts data with data; a weighted mean keeps the scale of what it averages."""
    (out,) = reader.plain(eqn, inputs)
    if isinstance(out.data, Samples) or not axes[0].contracted:
        return [out]
    n_terms = math.prod(inputs[0].shape[i] for i in axes[0].contracted)
    for i, (value, value_axes) in enumerate(zip(inputs, axes)):
        along = value_axes.contracted
        is_selection = samples.is_one_hot(value.data, along, n_terms)
        is_mean = value.from_batch and samples.is_average(value.data, along, n_terms)
        if is_mean and not is_selection:
            return [_to_rms(out, math.sqrt(values.mean_square(inputs[1 - i].data)))]
    return [out]


def reduce_sum(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Handles a sum over axes of a product with a parameter: also a contraction."""
    (out,) = reader.plain(eqn, inputs)
    (value,), axes = inputs, eqn.params["axes"]
    if value.views:
        reader.note(inputs, "used by 'reduce_sum', for which there is no rule")
    # A sum over everything is a loss, not a layer.
    if value.product is None or len(axes) == len(value.shape):
        return [out]
    view, ms, data_uses = value.product
    if any(not view.param_axes((axis,)) for axis in axes):
        return [out]
    n_terms = math.prod(value.shape[axis] for axis in axes)
    role = roles.role_of_view(view, "contracted", contracted=axes)
    use = Use(kind=uses.CONTRACTED, reduced=view.param_axes(axes), n_terms=n_terms, role=role)
    reader.record.followed |= data_uses
    reader.record.add(view, use, ms, data_uses)
    return [_to_rms(out, 1.0)]


def _to_rms(value: Value, rms: float, *, skip_zeros: bool = False) -> Value:
    """Rescales a value to this rms, as a kernel of the right scale would."""
    x = value.data.samples if isinstance(value.data, Samples) else value.data
    measured = np.asarray(x)[np.asarray(x) != 0] if skip_zeros else x
    factor = rms / (math.sqrt(values.mean_square(measured)) or 1.0)
    x = x * np.asarray(factor, x.dtype)
    return dataclasses.replace(value, data=Samples(x) if isinstance(value.data, Samples) else x)


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": dot_general,
    "conv_general_dilated": conv,
    "reduce_sum": reduce_sum,
}
