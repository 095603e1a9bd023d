"""Rules for operations after which a parameter is still that parameter.

They move its entries about, convert them, join it with others or multiply it by a
constant. Each rule says where the parameter's axes went.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tekoa.optim.scale_reader import Reader, Rule, with_views
from tekoa.optim.scale_values import BATCH, Bag, Value
from tekoa.optim.scale_views import View


def _move(view_after: Callable[[Any, View], View | None]) -> Rule:
    """Makes the rule of an operation on one value from what it does to a view."""

    def rule(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
        (out,) = reader.plain(eqn, inputs)
        views = [view_after(eqn, view) for view in inputs[0].views]
        found = [view for view in views if view is not None]
        if len(found) < len(views):
            reader.note(inputs, f"lost sight of in {eqn.primitive.name!r}, which mixes its axes")
        return [with_views(out, found)]

    return rule


def same(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Keeps each input as it is: copies, casts, changes of sign or of sharding."""
    outs = reader.plain(eqn, inputs)
    return [
        with_views(out, value.views if out.deps > BATCH else ()) for out, value in zip(outs, inputs)
    ]


def stop_gradient(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Cuts it off: what follows is not learned."""
    reader.note(inputs, "read only behind stop_gradient, so nothing is learned")
    (value,) = inputs
    return [Value(shape=value.shape, dtype=value.dtype, data=value.data, deps=value.deps & BATCH)]


def split(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Cuts it into pieces along one axis."""
    axis, start = eqn.params["axis"], 0
    outs = []
    for out in reader.plain(eqn, inputs):
        starts = [start if i == axis else 0 for i in range(len(out.shape))]
        outs.append(with_views(out, [v.sliced(starts, out.shape) for v in inputs[0].views]))
        start += out.shape[axis]
    return outs


def dynamic_slice(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Takes the slice at an index that the batch has no part in, such as a layer's number."""
    sizes = eqn.params["slice_sizes"]
    shape = inputs[0].shape
    starts = [
        0 if isinstance(index.data, Bag) else int(np.clip(int(index.data), 0, n - size))
        for index, n, size in zip(inputs[1:], shape, sizes)
    ]
    (out,) = reader.plain(eqn, inputs)
    return [with_views(out, [view.sliced(starts, sizes) for view in inputs[0].views])]


def join(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Joins parameters, as fused kernels do, or pads, masks or bounds one by constants."""
    (out,) = reader.plain(eqn, inputs)
    views = []
    for view in (view for value in inputs for view in value.views):
        views.append(view.within(out.shape))
    return [with_views(out, views)]


def _reshape(eqn: Any, view: View) -> View | None:
    permutation = eqn.params["dimensions"]
    view = view if permutation is None else view.transposed(permutation)
    return view.reshaped(eqn.outvars[0].aval.shape)


def _slice(eqn: Any, view: View) -> View:
    return view.sliced(eqn.params["start_indices"], eqn.outvars[0].aval.shape)


RULES: dict[str, Rule] = {
    "abs": same,
    "convert_element_type": same,
    "copy": same,
    "copy_p": same,
    "neg": same,
    "reduce_precision": same,
    "sharding_constraint": same,
    "rev": same,
    "name": same,
    "optimization_barrier": same,
    "pvary": same,
    "pcast": same,
    "pbroadcast": same,
    "reshard": same,
    "mesh_cast": same,
    "layout_constraint": same,
    "stop_gradient": stop_gradient,
    "reshape": _move(_reshape),
    "transpose": _move(lambda eqn, view: view.transposed(eqn.params["permutation"])),
    "squeeze": _move(lambda eqn, view: view.squeezed(eqn.params["dimensions"])),
    "broadcast_in_dim": _move(
        lambda eqn, view: view.broadcast(eqn.params["shape"], eqn.params["broadcast_dimensions"])
    ),
    "slice": _move(_slice),
    "split": split,
    "pad": join,
}
