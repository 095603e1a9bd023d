"""Scales, slot shapes and rate of Amos, read off the model instead of set by hand.

`scales` traces the model, reads it once (on a real batch, or from shapes alone) and tells
for every parameter how large its entries should be and which of its axes may share a slot.
`amos_for` makes the optimizer from that.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import optax

from tekoa.core import rules, trees
from tekoa.optim import amos, scale_rows, scale_trace
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

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.zeros((100, 10)), 'b': jnp.zeros(10)}
    >>> print(scales(lambda p, x: x @ p['w'] + p['b'], params, 2 * jnp.ones((8, 100))))
    name  shape      eta   slot     reason
    b     (10,)      0.5   ()       added to data of rms 1
    w     (100, 10)  0.05  (1, 10)  contracted over axes 0: 100 terms of rms 2
    """
    leaves = scale_trace.checked_leaves(params)
    arrays, merge = scale_trace.split_static(batch)
    jaxpr = scale_trace.trace(fn, params, arrays, merge)
    return ScaleTable(scale_rows.find_rows(jaxpr, trees.leaf_names(params), leaves, arrays))


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

    >>> import jax, jax.numpy as jnp
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
