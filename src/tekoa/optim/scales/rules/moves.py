"""Rules for operations after which a parameter is still that parameter.

They move or convert its entries, or join it with others. Each rule returns a value whose
views hold where the parameter's axes are afterwards.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tekoa.optim.scales.interpreter import Reader, Rule, views_of, with_views
from tekoa.optim.scales.values import BATCH, Samples, Value
from tekoa.optim.scales.views import View


def _move(view_after: Callable[[Any, View], View | None]) -> Rule:
    """Creates the rule of an operation on one value from its effect on a view."""

    def rule(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
        (out,) = reader.plain(eqn, inputs)
        views = [view_after(eqn, view) for view in inputs[0].views]
        remaining = [view for view in views if view is not None]
        if len(remaining) < len(views):
            reader.note(inputs, f"no longer traceable after {eqn.primitive.name!r} mixed its axes")
        return [with_views(out, remaining)]

    return rule


def same(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Keeps the views: copies, casts, changes of sign or sharding."""
    outs = reader.plain(eqn, inputs)
    return [
        with_views(out, value.views if out.deps > BATCH else ()) for out, value in zip(outs, inputs)
    ]


def stop_gradient(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Drops the parameter: behind stop_gradient it is not trained."""
    reader.note(inputs, "used only behind stop_gradient, so it is not trained")
    (value,) = inputs
    return [Value(shape=value.shape, dtype=value.dtype, data=value.data, deps=value.deps & BATCH)]


def split(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Splits the parameter along one axis."""
    axis, start, outs = eqn.params["axis"], 0, []
    for out in reader.plain(eqn, inputs):
        starts = [start if i == axis else 0 for i in range(len(out.shape))]
        outs.append(with_views(out, [v.sliced(starts, out.shape) for v in inputs[0].views]))
        start += out.shape[axis]
    return outs


def dynamic_slice(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Slices at an index that does not depend on the batch, such as a layer's number."""
    sizes = eqn.params["slice_sizes"]
    starts = [
        0 if isinstance(index.data, Samples) else int(np.clip(int(index.data), 0, n - size))
        for index, n, size in zip(inputs[1:], inputs[0].shape, sizes)
    ]
    (out,) = reader.plain(eqn, inputs)
    return [with_views(out, [view.sliced(starts, sizes) for view in inputs[0].views])]


def join(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Joins parameters into a fused kernel, or pads, masks or clips one by constants."""
    (out,) = reader.plain(eqn, inputs)
    return [with_views(out, [view.within(out.shape) for view in views_of(inputs)])]


def _reshape(eqn: Any, view: View) -> View | None:
    permutation = eqn.params["dimensions"]
    view = view if permutation is None else view.transposed(permutation)
    return view.reshaped(eqn.outvars[0].aval.shape)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["abs", "neg", "rev", "copy", "copy_p", "name", "optimization_barrier"], same),
    **dict.fromkeys(["convert_element_type", "reduce_precision", "layout_constraint"], same),
    **dict.fromkeys(["sharding_constraint", "reshard", "mesh_cast"], same),
    **dict.fromkeys(["pvary", "pcast", "pbroadcast"], same),
    "stop_gradient": stop_gradient,
    "reshape": _move(_reshape),
    "transpose": _move(lambda eqn, view: view.transposed(eqn.params["permutation"])),
    "squeeze": _move(lambda eqn, view: view.squeezed(eqn.params["dimensions"])),
    "broadcast_in_dim": _move(
        lambda eqn, view: view.broadcast(eqn.params["shape"], eqn.params["broadcast_dimensions"])
    ),
    "slice": _move(
        lambda eqn, view: view.sliced(eqn.params["start_indices"], eqn.outvars[0].aval.shape)
    ),
    "split": split,
    "pad": join,
}
