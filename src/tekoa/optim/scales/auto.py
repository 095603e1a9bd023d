"""Scales, slot shapes and roles of parameters, and Amos, derived from the model.

`scales_of_function` traces the model, interprets it once (on a real batch, or from shapes
alone), and returns for every parameter the expected size of its entries, the axes that can
share a slot, and its role. `amos_for` creates the optimizer from that. For models of a library, see
`tekoa.find_scales`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import optax

from tekoa.core import rules, trees
from tekoa.optim.amos import budget, transform
from tekoa.optim.scales import find, trace
from tekoa.optim.scales.table import ScaleTable


def scales_of_function(fn: Callable[..., Any], params: trees.PyTree, *batch: Any) -> ScaleTable:
    """Finds the scale, slot shape and role of every parameter of a function.

    Nothing is trained; a real batch takes seconds on CPU. If `batch` contains
    `jax.ShapeDtypeStruct` instead of arrays, no array of the model's size is computed, and
    floating inputs are assumed to have unit rms.

    Args:
        fn: `fn(params, *batch)` returns the loss or the model's outputs, any pytree.
        params: The parameters, or their shapes. Values matter only for parameters that no
            rule can place.
        *batch: The other arguments of `fn`: arrays, shapes or keys. Python numbers, strings
            and None are passed on unchanged.

    Returns:
        One row per parameter; print it to see the scales and their reasons.

    Raises:
        ValueError: If `fn` cannot be traced on this batch, cannot be differentiated, or
            does not depend on any parameter.
        TypeError: If a leaf of `params` is not an array.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.zeros((100, 10)), 'b': jnp.zeros(10)}
    >>> fn = lambda p, x: x @ p['w'] + p['b']
    >>> print(scales_of_function(fn, params, 2 * jnp.ones((8, 100))))
    name  shape      eta   slot     role       reason
    b     (10,)      0.5   ()       f output   added to data of rms 1
    w     (100, 10)  0.05  (1, 10)  cf output  contracted over axes 0: 100 terms of rms 2
    """
    leaves = trace.check_leaves(params)
    arrays, merge = trace.split_static(batch)
    jaxpr = trace.trace(fn, params, arrays, merge)
    return ScaleTable(find.find_rows(jaxpr, trees.leaf_names(params), leaves, arrays))


scales = scales_of_function  # The former name.


def amos_for(
    model_or_fn: Any,
    params: trees.PyTree,
    batch: Any,
    *,
    n_batches: int | None = None,
    n_steps: int | None = None,
    learning_rate: transform.ScheduleOrFloat | None = None,
    eta: Mapping[str, Any] | None = None,
    slot_shape: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> optax.GradientTransformation:
    """Creates Amos for a model, without any manual settings.

    Args:
        model_or_fn: A function `fn(params, *batch)`, or a module with an `apply` method
            like that of Linen.
        params: The parameters to train, or their shapes.
        batch: One batch, or its shapes; a tuple is several arguments.
        n_batches: Number of independent batches in the data: examples / batch size.
        n_steps: The number of steps of the training run. If set, the later form of Amos is
            used, whose rate and decay follow from it, without `n_batches`.
        learning_rate: A number or a schedule; 1 / sqrt(n_batches) if None.
        eta: Scales that override those of the model: regex of the joined name -> a number
            or a formula of `SHAPE`. The first match wins; without a match the model's counts.
        slot_shape: Slot shapes that override those of the model, in the same way.
        **overrides: Other arguments of `amos`, such as `beta`.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: If not exactly one of `n_batches` and `n_steps` is set or it is not
            positive, if a learning rate is set with `n_steps`, or for the reasons of
            `scales_of_function`.

    >>> import jax, jax.numpy as jnp
    >>> params = {'w': jnp.ones((100, 10))}
    >>> tx = amos_for(lambda p, x: x @ p['w'], params, jnp.ones((8, 100)), n_batches=400)
    >>> jax.tree.map(jnp.shape, tx.init(params).v)
    {'w': (1, 10)}
    """
    if (n_steps is None) == (n_batches is None):
        raise ValueError("Pass either n_batches= or, for the later form of Amos, n_steps=.")
    if n_steps is None and not (n_batches or 0) > 0:
        raise ValueError(
            f"n_batches must be positive, got {n_batches!r}. Pass the number of training examples "
            "divided by the batch size."
        )
    if n_steps is not None and learning_rate is not None:
        raise ValueError("With n_steps= the rate follows from it; omit learning_rate.")
    arguments = batch if isinstance(batch, tuple) else (batch,)
    table = scales_of_function(as_function(model_or_fn), params, *arguments)
    eta_fn = with_overrides(table.eta_fn, eta or {})
    shape_fn = with_overrides(table.shape_fn, slot_shape or {})
    if n_steps is not None:
        return budget.amos_for_budget(n_steps, eta_fn, shape_fn, **overrides)
    rate = 1 / math.sqrt(n_batches or 1) if learning_rate is None else learning_rate
    return transform.amos(rate, eta_fn, shape_fn, **overrides)


def with_overrides(default: rules.ParamsFn, overrides: Mapping[str, Any]) -> rules.ParamsFn:
    """Returns a function of name and shape that prefers a rule table over `default`.

    >>> eta = with_overrides(lambda name, shape: 0.5, {'.*kernel': '1 / SHAPE[0]'})
    >>> eta(('dense', 'kernel'), (4, 2)), eta(('dense', 'bias'), (2,))
    (0.25, 0.5)
    """
    by_rule = rules.params_fn_from_assign_map(overrides, eval_str_value=True)

    def params_fn(name: trees.Name, shape: tuple[int, ...]) -> Any:
        try:
            return by_rule(name, shape)
        except rules.NoRuleError:
            return default(name, shape)

    return params_fn


def as_function(model_or_fn: Any) -> Callable[..., Any]:
    """Returns `fn(params, *batch)` for a function or a module with `apply`.

    Raises:
        TypeError: If it is neither.
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
        f"{type(model_or_fn).__name__}. {trace.FOR_LIBRARIES}"
    )
