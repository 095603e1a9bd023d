"""Amos: an Adam-style optimizer whose weight decay targets a given scale per parameter.

The algorithm is that of arXiv 2210.11693. Besides a learning rate it needs the expected
scale of each parameter's entries (`eta_fn`). Slots may be reduced to a small shape
(`shape_fn`), so that they use almost no memory.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import rules, trees
from tekoa.optim.amos import slots

ScheduleOrFloat = float | jax.Array | Callable[[jax.Array], Any]

_record: contextvars.ContextVar[dict[str, float] | None] = contextvars.ContextVar(
    "recorded Amos scales", default=None
)


class ScaleByAmosState(NamedTuple):
    """The state of Amos between steps."""

    count: Any  # Completed updates, an int32 array.
    v: trees.PyTree  # Running mean of squared gradients, in the slots' shapes.
    b: trees.PyTree  # Accumulated decay, in the slots' shapes.


def amos(
    learning_rate: ScheduleOrFloat,
    eta_fn: rules.ParamsFn,
    shape_fn: rules.ParamsFn | None = None,
    *,
    beta: float = 0.999,
    momentum: float | None = None,
    clip_value: float | None = None,
    extra_l2: float = 0.0,
    d_coef: float = 0.25,
    c_coef: float = 0.25,
    epsilon: float = 2**-125,
) -> optax.GradientTransformation:
    """Creates the Amos optimizer, for use with `optax.apply_updates`.

    Args:
        learning_rate: About 1/sqrt(number of independent batches in the data). A number, or
            a schedule of the update count, which starts at 1.
        eta_fn: `(name, shape)` -> the expected scale of the parameter's entries, a number
            or an array that broadcasts to the parameter.
        shape_fn: `(name, shape)` -> the shape of the parameter's slots, which must broadcast
            to the parameter: some axes 1, or () for a scalar. None keeps the full shape.
        beta: Decay of the running mean of squared gradients.
        momentum: Decay of a moving average of the updates, without bias correction.
        clip_value: Gradients are first clipped elementwise to plus or minus this value.
        extra_l2: Weight of an additional L2 term.
        d_coef: Coefficient of the decay of the update.
        c_coef: Coefficient of the decay of the regularisation.
        epsilon: Lower bound of the running mean.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: If a number is out of range; from `init`, if an eta is negative or a
            slot shape does not broadcast to its parameter.

    >>> tx = amos(0.1, lambda name, shape: 1.0, lambda name, shape: ())
    >>> params = {'w': jnp.ones((2, 3))}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({'w': jnp.ones((2, 3))}, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> jax.tree.map(jnp.shape, state.v)
    {'w': ()}
    """
    check_range("momentum", momentum, 0, 1)
    check_range("clip_value", clip_value, 0, np.inf)
    scaled = scale_by_amos(
        learning_rate,
        eta_fn,
        shape_fn,
        beta=beta,
        extra_l2=extra_l2,
        d_coef=d_coef,
        c_coef=c_coef,
        epsilon=epsilon,
    )
    if clip_value is None and momentum is None:
        return scaled
    stages = [] if clip_value is None else [optax.clip(clip_value)]
    stages.append(scaled)
    if momentum is not None:
        stages.append(in_float32(optax.ema(momentum, debias=False)))
    return optax.chain(*stages)


# `from tekoa import amos; amos.amos(...)`: programs written for JEstimator import a module.
vars(amos)["amos"] = amos


def scale_by_amos(
    learning_rate: ScheduleOrFloat,
    eta_fn: rules.ParamsFn,
    shape_fn: rules.ParamsFn | None = None,
    *,
    beta: float = 0.999,
    extra_l2: float = 0.0,
    d_coef: float = 0.25,
    c_coef: float = 0.25,
    epsilon: float = 2**-125,
) -> optax.GradientTransformation:
    """Creates the core transformation of `amos`, without clipping and momentum.

    Arguments and errors are those of `amos`. The updates include the learning rate and the
    sign, so they can be added to the parameters directly.
    """
    check_range("beta", beta, 0, 1)
    for name, value in {"extra_l2": extra_l2, "d_coef": d_coef, "c_coef": c_coef}.items():
        check_range(name, value, 0, np.inf)

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, ScaleByAmosState]:
        if params is None:
            raise ValueError("Amos needs params: call update(grads, state, params).")
        count: Any = optax.safe_increment(state.count)
        xi = learning_rate(count) if callable(learning_rate) else learning_rate
        xi = jnp.asarray(xi, jnp.float32)
        # 1 - beta**count, computed without cancellation.
        unbias = -jnp.expm1(count.astype(jnp.float32) * jnp.log(jnp.asarray(beta, jnp.float32)))

        def update_param(name: trees.Name, param: Any, g: Any, v: jax.Array, b: jax.Array):
            if g is None:
                return None, v, b
            dtype = compute_dtype(param)
            theta, grad = jnp.asarray(param, dtype), jnp.asarray(g, dtype)
            eta = jnp.asarray(slots.eta_of(eta_fn, name, theta.shape), dtype)
            # The letters are the paper's: theta, g, v, b, eta, xi, gamma, D.
            g2 = slots.mean_of_squares(grad, v.shape)
            v = (beta * v + (1 - beta) * g2).astype(dtype)
            floored, shrink = jnp.maximum(v, epsilon), 1 + c_coef * jnp.sqrt(xi) * b
            gamma = xi**2 * unbias * g2 / floored * jax.lax.rsqrt(shrink)
            one_by_D = 1 + d_coef * jnp.sqrt(xi * eta) * b
            decay = 0.5 * gamma + extra_l2
            rate = xi * eta * jnp.sqrt(unbias) * jax.lax.rsqrt(floored)
            if v.shape == theta.shape:
                delta = -(decay * theta + rate * grad) / one_by_D
            else:
                # XLA stores quotients of small slots, but would recompute products for every
                # entry of the parameter.
                decay, rate = decay / one_by_D, rate / one_by_D
                delta = -decay * theta - rate * grad
            delta = delta.astype(jnp.result_type(g))
            # Gamma again, written so that XLA does not share it with the update: on CPU, a
            # value shared by two outputs is stored at full size, which took most of the time.
            b = b + (1 + b) * (xi**2 * unbias * g2) / (floored * jnp.sqrt(shrink))
            readers = param + delta if v.shape == theta.shape else decay + rate
            if readers.shape == b.shape:  # Otherwise eta has more axes than the slots.
                b = _computed_after(readers, b)
            return delta, v, b.astype(dtype)

        return map_slots(update_param, updates, state._replace(count=count), params)

    return optax.GradientTransformation(functools.partial(init_slots, eta_fn, shape_fn), update)


def init_slots(
    eta_fn: rules.ParamsFn, shape_fn: rules.ParamsFn | None, params: trees.PyTree
) -> ScaleByAmosState:
    """Creates the state before the first step, and records the scales."""

    def slot(name: trees.Name, param: Any) -> jax.Array:
        record_scale(name, slots.eta_of(eta_fn, name, jnp.shape(param)))
        # zeros_like: a slot of the parameter's shape is also sharded like it.
        shape = slots.slot_shape_of(shape_fn, name, jnp.shape(param))
        return jnp.zeros_like(param, compute_dtype(param), shape)

    v, b = trees.map_named(slot, params), trees.map_named(slot, params)
    return ScaleByAmosState(count=jnp.zeros((), jnp.int32), v=v, b=b)


def scales_of(optimizer: optax.GradientTransformation, params: trees.PyTree) -> dict[str, float]:
    """Returns the scales of the parameters that an optimizer trains with Amos.

    Args:
        optimizer: Any optimizer; Amos may be anywhere in a chain or a group.
        params: The parameters, or their shapes.

    Returns:
        Name to scale, or to its rms if it is an array; empty without Amos.

    >>> tx = optax.chain(optax.clip(1.0), amos(0.1, lambda name, shape: 0.5))
    >>> scales_of(tx, {'dense': {'kernel': jnp.ones((2, 3))}})
    {'dense/kernel': 0.5}
    """
    scales: dict[str, float] = {}

    def init(params: trees.PyTree) -> optax.OptState:
        # Chains hide their parts, so Amos records its scales while it is initialised.
        _record.set(scales)
        return optimizer.init(params)

    contextvars.copy_context().run(jax.eval_shape, init, params)
    return scales


def record_scale(name: trees.Name, eta: Any) -> None:
    """Adds a scale to the records of `recorded_scales`."""
    record = _record.get()
    if record is not None:
        record["/".join(name)] = float(np.sqrt(np.mean(np.square(eta, dtype=np.float64))))


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `tx`, and stores its slots, in at least float32; updates keep their dtype."""

    def widen(tree: trees.PyTree) -> trees.PyTree:
        return jax.tree.map(lambda x: jnp.asarray(x, compute_dtype(x)), tree)

    def update(
        updates: trees.PyTree, state: optax.OptState, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, optax.OptState]:
        wide, state = tx.update(widen(updates), state, params)
        return jax.tree.map(lambda x, g: x.astype(jnp.result_type(g)), wide, updates), state

    def init(params: trees.PyTree) -> optax.OptState:
        return tx.init(jax.tree.map(lambda x: jnp.zeros_like(x, compute_dtype(x)), params))

    return optax.GradientTransformation(init, update)


def map_slots(
    update_param: Callable[..., tuple[Any, jax.Array, jax.Array]],
    updates: trees.PyTree,
    state: ScaleByAmosState,
    params: trees.PyTree,
) -> tuple[trees.PyTree, ScaleByAmosState]:
    """Applies `update_param` to every parameter; a gradient may be None."""
    leaves, treedef = jax.tree.flatten(params)
    try:
        grads = treedef.flatten_up_to(updates)
        v_and_b = treedef.flatten_up_to(state.v), treedef.flatten_up_to(state.b)
    except (ValueError, TypeError, KeyError) as error:
        trees.check_same_structure(params, updates, "gradients")
        trees.check_same_structure(params, state.v, "slots of the Amos state")
        raise ValueError(f"Amos cannot match gradients and parameters: {error}") from None
    rows = []
    for name, leaf, g, v, b in zip(trees.leaf_names(params), leaves, grads, *v_and_b, strict=True):
        if g is not None and jnp.shape(g) != jnp.shape(leaf):
            raise ValueError(
                f"The gradient of {'/'.join(name)!r} has shape {jnp.shape(g)}, "
                f"but the parameter has shape {jnp.shape(leaf)}."
            )
        rows.append(update_param(name, leaf, g, v, b))
    columns = [treedef.unflatten(column) for column in zip(*rows, strict=True)]
    deltas, v, b = columns or (updates, state.v, state.b)
    return deltas, ScaleByAmosState(state.count, v, b)


def _computed_after(first: jax.Array, b: jax.Array) -> jax.Array:
    """Returns b, or NaN where `first` is NaN, which makes XLA compute `first` first.

    Both `first` and the new b read the old b. With the order fixed, XLA writes the new b
    over the old one instead of copying the old one beforehand.
    """
    return jnp.where(jnp.isnan(first), jnp.nan, b)


def compute_dtype(param: Any) -> jnp.dtype:
    """Returns the dtype of slots and arithmetic: float32 for every smaller float."""
    dtype = jnp.result_type(param)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"This optimizer supports real floating-point parameters only, got dtype {dtype}. "
            "Exclude this one with optax.masked or tekoa.param_groups."
        )
    return trees.wide_dtype(param)


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raises if a setting is out of range."""
    # Inside optax.inject_hyperparams the value is an array and is not checked.
    if isinstance(value, (int, float)) and not low <= value < high:
        raise ValueError(f"{name} must be in [{low}, {high}), got {value}.")
