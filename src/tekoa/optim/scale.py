"""Scales, slot shapes and rate of Amos, read off the model instead of set by hand.

`scales` traces the model, reads it once (on a real batch, or from shapes alone) and tells
for every parameter how large its entries should be and which of its axes may share a slot.
`amos_for` makes the optimizer from that.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import rules, trees
from tekoa.optim import (
    amos,
    scale_consume,
    scale_contract,
    scale_control,
    scale_moves,
    scale_reader,
    scale_trace,
    scale_uses,
    scale_values,
    scale_views,
)
from tekoa.optim.scale_table import ScaleRow as ScaleRow
from tekoa.optim.scale_table import ScaleTable as ScaleTable


def scales(fn: Callable[..., Any], params: trees.PyTree, *batch: Any) -> ScaleTable:
    """Finds the scale and the slot shape of every parameter of a model.

    Nothing is compiled as a whole and nothing is trained; a real batch takes seconds on
    CPU. Where `batch` holds `jax.ShapeDtypeStruct` instead of arrays, nothing of the
    model's size is computed at all: floating inputs are then taken to have unit rms.

    Args:
        fn: `fn(params, *batch)` gives the loss or the model's outputs, any pytree.
        params: The parameters, or their shapes. Their values matter only for what cannot
            be placed.
        *batch: What else `fn` takes: arrays, shapes or keys. Python numbers, strings and
            None are passed on as they are.

    Returns:
        One row per parameter; print it to see what was found and why.

    Raises:
        ValueError: If `fn` cannot be traced on this batch, cannot be differentiated, or
            does not depend on any parameter.
        TypeError: If a leaf of `params` is not an array.

    >>> params = {'w': jnp.zeros((100, 10)), 'b': jnp.zeros(10)}
    >>> print(scales(lambda p, x: x @ p['w'] + p['b'], params, 2 * jnp.ones((8, 100))))
    name  shape      eta   slot     reason
    b     (10,)      0.5   ()       added of rms 1
    w     (100, 10)  0.05  (1, 10)  contracted over axes 0: 100 terms of rms 2
    """
    leaves = scale_trace.checked_leaves(params)
    dynamic, merge = scale_trace.split_static(batch)
    jaxpr = scale_trace.trace(fn, params, dynamic, merge)
    shapes_only = any(isinstance(x, jax.ShapeDtypeStruct) for x in dynamic)
    known: dict[int, float] = {}
    while True:
        reader = _reader(shapes_only, known)
        outs = reader.run(jaxpr, _inputs(reader, leaves, dynamic))
        placed = {
            i: placement
            for i, leaf in enumerate(leaves)
            if (placement := scale_uses.place(reader.ledger.uses.get(i, {}), leaf.shape))
        }
        tied = {
            i: placement.eta
            for i, placement in placed.items()
            if any(use.kind is scale_uses.LOOKED_UP for use in reader.ledger.uses[i])
            and placement.eta < 1
        }
        if known or not tied:
            break
        known = tied  # Read again, so that what follows a tied embedding sees its true scale.
    deps = _dependence(outs)
    return ScaleTable(
        [
            _row(name, leaf, placed.get(i), _reason(reader, i, leaf, deps))
            for i, (name, leaf) in enumerate(zip(trees.leaf_names(params), leaves, strict=True))
        ]
    )


def amos_for(
    model_or_fn: Any,
    params: trees.PyTree,
    batch: Any,
    *,
    n_batches: int,
    learning_rate: amos.ScheduleOrFloat | None = None,
    eta: Mapping[str, Any] | None = None,
    slot_shape: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> optax.GradientTransformation:
    """Makes Amos for a model, with no number set by hand.

    Args:
        model_or_fn: A function `fn(params, *batch)`, or a module with an `apply` method
            in the manner of Linen.
        params: The parameters that will be trained, or their shapes.
        batch: One batch, or its shapes; a tuple is several arguments.
        n_batches: How many independent batches the data holds: examples over batch size.
        learning_rate: Instead of 1 / sqrt(n_batches): a number or a schedule.
        eta: Scales that override the found ones: regex of the joined name -> a number or
            a formula of `SHAPE`. The first match wins; no match leaves the found one.
        slot_shape: Slot shapes that override the found ones, in the same way.
        **overrides: Other arguments of `tekoa.optim.amos.amos`, such as `beta`.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: If `n_batches` is not positive, or as `scales` does.

    >>> params = {'w': jnp.ones((100, 10))}
    >>> tx = amos_for(lambda p, x: x @ p['w'], params, jnp.ones((8, 100)), n_batches=400)
    >>> jax.tree.map(jnp.shape, tx.init(params).v)
    {'w': (1, 10)}
    """
    if not n_batches > 0:
        raise ValueError(
            f"n_batches must be positive, got {n_batches!r}: the number of examples in the "
            "training data divided by the batch size."
        )
    arguments = batch if isinstance(batch, tuple) else (batch,)
    table = scales(as_function(model_or_fn), params, *arguments)
    return amos.amos(
        1 / math.sqrt(n_batches) if learning_rate is None else learning_rate,
        with_overrides(table.eta_fn, eta or {}),
        with_overrides(table.shape_fn, slot_shape or {}),
        **overrides,
    )


def with_overrides(found: rules.ParamsFn, overrides: Mapping[str, Any]) -> rules.ParamsFn:
    """Puts a rule table before a function of name and shape.

    >>> eta = with_overrides(lambda name, shape: 0.5, {'.*kernel': '1 / SHAPE[0]'})
    >>> eta(('dense', 'kernel'), (4, 2)), eta(('dense', 'bias'), (2,))
    (0.25, 0.5)
    """
    by_rule = rules.params_fn_from_assign_map(overrides, eval_str_value=True)

    def params_fn(name: trees.Name, shape: tuple[int, ...]) -> Any:
        try:
            return by_rule(name, shape)
        except rules.NoRuleError:
            return found(name, shape)

    return params_fn


def as_function(model_or_fn: Any) -> Callable[..., Any]:
    """Gives `fn(params, *batch)` for a function or for a module with `apply`.

    Raises:
        TypeError: If it is neither; NNX and Equinox modules go through their own split.
    """
    apply = getattr(model_or_fn, "apply", None)
    if callable(apply):

        def apply_model(params: trees.PyTree, *batch: Any) -> Any:
            has_collections = isinstance(params, Mapping) and "params" in params
            return apply(params if has_collections else {"params": params}, *batch)

        return apply_model
    if callable(model_or_fn):
        return model_or_fn
    raise TypeError(
        f"Expected a function fn(params, *batch) or a module with an apply method, got "
        f"{type(model_or_fn).__name__}. For NNX and Equinox, split the model and merge it "
        "inside a function."
    )


def _reader(shapes_only: bool, known: Mapping[int, float]) -> scale_reader.Reader:
    return scale_reader.Reader(
        always=scale_control.RULES | scale_contract.RULES,
        on_views=scale_moves.RULES | scale_consume.RULES,
        shapes_only=shapes_only,
        known=known,
    )


def _inputs(
    reader: scale_reader.Reader, leaves: list[Any], arrays: list[Any]
) -> list[scale_values.Value]:
    values = []
    for i, leaf in enumerate(leaves):
        value = _input(reader, leaf, scale_values.param_bit(i))
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            value = scale_reader.with_views(value, [scale_views.View.whole(i, leaf.shape)])
        values.append(value)
    return values + [_input(reader, x, scale_values.BATCH) for x in arrays]


def _input(reader: scale_reader.Reader, x: Any, deps: int) -> scale_values.Value:
    data = x
    if isinstance(x, jax.ShapeDtypeStruct):
        data = scale_values.unit_bag(x.dtype, reader.rng())
    elif reader.shapes_only and math.prod(x.shape) > scale_reader.HUGE:
        data = scale_values.Bag(scale_values.as_samples(x))
    return scale_values.Value(shape=tuple(x.shape), dtype=x.dtype, data=data, deps=deps)


def _dependence(outs: list[scale_values.Value]) -> int:
    deps = 0
    for value in outs:
        deps |= value.deps
    if deps <= scale_values.BATCH:
        raise ValueError(
            "The model's output does not depend on any parameter in a way that has a gradient. "
            "Check that fn uses the params it is given, and that its output is floating."
        )
    return deps


def _reason(reader: scale_reader.Reader, i: int, leaf: Any, deps: int) -> str | None:
    """Why parameter i has no scale of its own, if that can be told."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return f"it is of {leaf.dtype}, which has no gradient"
    if not deps & scale_values.param_bit(i):
        note = reader.ledger.notes.get(i, "")
        return "unused: the output does not depend on it" + (f" ({note})" if note else "")
    return reader.ledger.notes.get(i, "used in no way that has a rule")


def _row(
    name: trees.Name, leaf: Any, placement: scale_uses.Placement | None, reason: str
) -> ScaleRow:
    shape = tuple(leaf.shape)
    if placement is None or reason.startswith("unused"):
        return _fallback_row(name, leaf, reason)
    reduced = placement.reduced
    slot_shape = tuple(1 if i in reduced else n for i, n in enumerate(shape))
    return ScaleRow(
        name=name,
        shape=shape,
        eta=placement.eta,
        slot_shape=() if len(reduced) == len(shape) else slot_shape,
        reason=placement.reason,
        eta_by_slice=placement.eta_by_slice,
    )


def _fallback_row(name: trees.Name, leaf: Any, reason: str) -> ScaleRow:
    shape = tuple(leaf.shape)
    is_known = not isinstance(leaf, jax.ShapeDtypeStruct)
    rms = math.sqrt(scale_values.mean_square(leaf)) if is_known else 0.0
    source = "its initial rms" if rms else f"1/sqrt(fan-in), its initial value is {'zero' if is_known else 'unknown'}"
    return ScaleRow(
        name=name,
        shape=shape,
        eta=rms or math.prod(shape[:-1]) ** -0.5,
        slot_shape=shape if len(shape) > 1 else (),
        reason=f"{reason}; {source} is taken",
        placed=False,
    )
