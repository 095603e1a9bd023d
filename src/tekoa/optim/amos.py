"""Amos: an Adam-style optimizer whose weight decay aims at a model-given scale.

The algorithm is of arXiv 2210.11693. Besides a learning rate it needs, for every
variable, the scale its entries are expected to have (`eta_fn`); slots may be reduced to
a small shape (`shape_fn`), which takes their memory to almost nothing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import rules, trees
from tekoa.optim import amos_shapes, squares

ScheduleOrFloat = float | jax.Array | Callable[[jax.Array], Any]

_record: contextvars.ContextVar[dict[str, float] | None] = contextvars.ContextVar(
    "scales of the Amos being initialised", default=None
)


class ScaleByAmosState(NamedTuple):
    """What Amos remembers between steps."""

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
    """Makes the Amos optimizer, ready for `optax.apply_updates`.

    Args:
        learning_rate: About 1/sqrt(number of independent batches in the data); a number
            or a schedule of the count of updates, this one included.
        eta_fn: `(name, shape)` -> the scale expected of that variable's entries, a
            number or an array that broadcasts to the variable.
        shape_fn: `(name, shape)` -> the shape of its slots, broadcastable to the
            variable: some axes 1, or () for one number. None keeps the full shape.
        beta: Decay of the running mean of squared gradients.
        momentum: Decay of a moving average of the updates, without bias correction.
        clip_value: Gradients are clipped to plus or minus this first, element by element.
        extra_l2: Weight of an additional L2 term.
        d_coef: Coefficient of the decay of the update.
        c_coef: Coefficient of the decay of the regularization.
        epsilon: Floor of the running mean.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: If a number is out of range; at `init`, if an eta is negative or a
            slot shape does not broadcast to its variable.

    >>> tx = amos(0.1, lambda name, shape: 1.0, lambda name, shape: ())
    >>> params = {'w': jnp.ones((2, 3))}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({'w': jnp.ones((2, 3))}, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> jax.tree.map(jnp.shape, state.v)
    {'w': ()}
    """
    _check_range("momentum", momentum, 0, 1)
    _check_range("clip_value", clip_value, 0, np.inf)
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
        stages.append(_in_float32(optax.ema(momentum, debias=False)))
    return optax.chain(*stages)


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
    """Makes the rescaling at the heart of `amos`, without clipping and momentum.

    Arguments and errors are those of `amos`. The result includes the learning rate and
    the sign: it is added to the parameters as it is.
    """
    _check_range("beta", beta, 0, 1)
    for name, value in {"extra_l2": extra_l2, "d_coef": d_coef, "c_coef": c_coef}.items():
        _check_range(name, value, 0, np.inf)

    def init(params: trees.PyTree) -> ScaleByAmosState:
        def slot(name: trees.Name, param: Any) -> jax.Array:
            _note_scale(name, amos_shapes.eta_of(eta_fn, name, jnp.shape(param)))
            # Split over devices as the parameter is, where it has the same shape.
            shape = amos_shapes.slot_shape_of(shape_fn, name, jnp.shape(param))
            return jnp.zeros_like(param, _compute_dtype(param), shape)

        v, b = trees.map_named(slot, params), trees.map_named(slot, params)
        return ScaleByAmosState(count=jnp.zeros((), jnp.int32), v=v, b=b)

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, ScaleByAmosState]:
        if params is None:
            raise ValueError("Amos needs the parameters: call update(grads, state, params).")
        count: Any = optax.safe_increment(state.count)
        xi = learning_rate(count) if callable(learning_rate) else learning_rate
        xi = jnp.asarray(xi, jnp.float32)
        # 1 - beta**count, without the cancellation of the plain form.
        unbias = -jnp.expm1(count.astype(jnp.float32) * jnp.log(jnp.asarray(beta, jnp.float32)))

        def one(name: trees.Name, param: Any, g: Any, v: jax.Array, b: jax.Array):
            if g is None:
                return None, v, b
            dtype = _compute_dtype(param)
            theta, grad = jnp.asarray(param, dtype), jnp.asarray(g, dtype)
            eta = jnp.asarray(amos_shapes.eta_of(eta_fn, name, theta.shape), dtype)
            # The letters are the paper's: theta, g, v, b, eta, xi, gamma, D.
            g2 = squares.mean_of_squares(grad, v.shape)
            v = (beta * v + (1 - beta) * g2).astype(dtype)
            floored, shrink = jnp.maximum(v, epsilon), 1 + c_coef * jnp.sqrt(xi) * b
            gamma = xi**2 * unbias * g2 / floored * jax.lax.rsqrt(shrink)
            one_by_D = 1 + d_coef * jnp.sqrt(xi * eta) * b
            decay = 0.5 * gamma + extra_l2
            rate = xi * eta * jnp.sqrt(unbias) * jax.lax.rsqrt(floored)
            if v.shape == theta.shape:
                delta = -(decay * theta + rate * grad) / one_by_D
            else:
                # Quotients of small slots are stored by XLA; products it would repeat for
                # every number of the variable.
                decay, rate = decay / one_by_D, rate / one_by_D
                delta = -decay * theta - rate * grad
            delta = delta.astype(jnp.result_type(g))
            # Gamma once more, spelled so that XLA does not share it with the update: what
            # two outputs share is stored at full size on CPU, which took most of the time.
            b = b + (1 + b) * (xi**2 * unbias * g2) / (floored * jnp.sqrt(shrink))
            readers = param + delta if v.shape == theta.shape else decay + rate
            if readers.shape == b.shape:  # Else a scale (eta) has more axes than the slots.
                b = _computed_after(readers, b)
            return delta, v, b.astype(dtype)

        return _map_slots(one, updates, state._replace(count=count), params)

    return optax.GradientTransformation(init, update)


@contextlib.contextmanager
def recorded_scales() -> Iterator[dict[str, float]]:
    """Gathers the scale of every parameter of which Amos is initialised in the body.

    However deep in a chain Amos stands: a report can tell the scales that training aims at.

    Yields:
        Name to scale, the root mean square where it is an array.

    >>> tx = optax.chain(optax.clip(1.0), amos(0.1, lambda name, shape: 0.5))
    >>> with recorded_scales() as found:
    ...     state = tx.init({'dense': {'kernel': jnp.ones((2, 3))}})
    >>> found
    {'dense/kernel': 0.5}
    """
    found: dict[str, float] = {}
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


def _note_scale(name: trees.Name, eta: np.ndarray) -> None:
    record = _record.get()
    if record is not None:
        record["/".join(name)] = float(np.sqrt(np.mean(np.square(eta, dtype=np.float64))))


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `tx` on float32 at least, so that its slots are, and keeps the updates' type."""

    def widen(tree: trees.PyTree) -> trees.PyTree:
        return jax.tree.map(lambda x: jnp.asarray(x, _compute_dtype(x)), tree)

    def update(
        updates: trees.PyTree, state: optax.OptState, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, optax.OptState]:
        new, state = tx.update(widen(updates), state, params)
        return jax.tree.map(lambda x, g: x.astype(jnp.result_type(g)), new, updates), state

    def init(params: trees.PyTree) -> optax.OptState:
        return tx.init(jax.tree.map(lambda x: jnp.zeros_like(x, _compute_dtype(x)), params))

    return optax.GradientTransformation(init, update)


def _map_slots(
    one: Callable[..., tuple[Any, jax.Array, jax.Array]],
    updates: trees.PyTree,
    state: ScaleByAmosState,
    params: trees.PyTree,
) -> tuple[trees.PyTree, ScaleByAmosState]:
    """Applies `one` to every variable; a gradient may be None where nothing is learned."""
    leaves, treedef = jax.tree.flatten(params)
    try:
        grads = treedef.flatten_up_to(updates)
        slots = treedef.flatten_up_to(state.v), treedef.flatten_up_to(state.b)
    except (ValueError, TypeError, KeyError) as error:
        trees.check_same_structure(params, updates, "gradients")
        trees.check_same_structure(params, state.v, "slots of the Amos state")
        raise ValueError(f"Amos cannot match gradients and parameters: {error}") from None
    rows = []
    for name, leaf, g, v, b in zip(trees.leaf_names(params), leaves, grads, *slots, strict=True):
        if g is not None and jnp.shape(g) != jnp.shape(leaf):
            raise ValueError(
                f"The gradient of {'/'.join(name)!r} has shape {jnp.shape(g)}, "
                f"the parameter has {jnp.shape(leaf)}."
            )
        rows.append(one(name, leaf, g, v, b))
    new = [treedef.unflatten(column) for column in zip(*rows, strict=True)]
    new = new or [updates, state.v, state.b]
    return new[0], ScaleByAmosState(state.count, new[1], new[2])


def _computed_after(first: jax.Array, b: jax.Array) -> jax.Array:
    """Gives b, or NaN where `first` is NaN; so XLA must compute `first` first.

    The old b is read by `first` and by the new b. Knowing which comes first, XLA writes the
    new b over the old one, and need not copy every old b beforehand.
    """
    return jnp.where(jnp.isnan(first), jnp.nan, b)


def _compute_dtype(param: Any) -> jnp.dtype:
    """Slots and arithmetic are float32 for every smaller float."""
    dtype = jnp.result_type(param)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Amos updates real floating parameters, got one of dtype {dtype}. "
            "Leave it out with optax.masked or tekoa.optim.groups."
        )
    return trees.wide_dtype(param)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    # Inside optax.inject_hyperparams the value is an array, which is not looked at.
    if isinstance(value, (int, float)) and not low <= value < high:
        raise ValueError(f"{name} must be in [{low}, {high}), got {value}.")
