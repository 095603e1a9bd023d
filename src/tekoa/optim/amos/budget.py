"""The later form of Amos, whose rate and decay follow from the number of steps.

This is the form that the author of Amos sent to the AlgoPerf benchmark. The rate of a slot
depends on how many numbers share it and on the length of the run, so that there is neither a
learning rate nor a schedule.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core import rules, trees
from tekoa.optim.amos import slots, transform


def amos_for_budget(
    n_steps: int,
    eta_fn: rules.ParamsFn,
    shape_fn: rules.ParamsFn | None = None,
    *,
    momentum: float | None = 0.9,
    **settings: Any,
) -> optax.GradientTransformation:
    """Creates the later form of Amos, with a moving average of the updates.

    Args:
        n_steps: The number of steps of the training run.
        eta_fn: As for `amos`.
        shape_fn: As for `amos`.
        momentum: Decay of the moving average of the updates; None for none.
        **settings: Other arguments of `scale_by_amos_budget`.

    Returns:
        A transformation whose `update` needs `params`.
    """
    scaled = scale_by_amos_budget(n_steps, eta_fn, shape_fn, **settings)
    if momentum is None:
        return scaled
    transform.check_range("momentum", momentum, 0, 1)
    return optax.chain(scaled, transform.in_float32(optax.ema(momentum, debias=False)))


def scale_by_amos_budget(
    n_steps: int,
    eta_fn: rules.ParamsFn,
    shape_fn: rules.ParamsFn | None = None,
    *,
    beta: float = 0.999,
    horizon: float = 0.7,
    epsilon: float = 2**-125,
) -> optax.GradientTransformation:
    """Creates the later form of Amos. The updates include the rate and the sign.

    Args:
        n_steps: The number of steps of the training run.
        eta_fn: As for `amos`.
        shape_fn: As for `amos`.
        beta: Decay of the running mean of squared gradients.
        horizon: The fraction of `n_steps` after which the accumulated decay dominates.
        epsilon: Lower bound of the running mean.

    Returns:
        A transformation whose state is that of `amos` and whose `update` needs `params`.

    Raises:
        ValueError: If `n_steps` is not positive.

    >>> tx = scale_by_amos_budget(100, lambda name, shape: 1.0)
    >>> params = {'w': jnp.ones(3)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    if not n_steps > 0:
        raise ValueError(f"n_steps must be positive, got {n_steps!r}.")

    def update_param(count: Any, name: trees.Name, param: Any, g: Any, v: Any, b: Any) -> Any:
        if g is None:
            return None, v, b
        dtype = v.dtype
        theta, grad = jnp.asarray(param, dtype), jnp.asarray(g, dtype)
        eta = jnp.asarray(slots.eta_of(eta_fn, name, theta.shape), dtype)
        k = max(1, theta.size // max(v.size, 1))  # Numbers per slot.
        tau = _tau(math.sqrt(k))
        xi2 = 2 * (tau + math.sqrt(2) - 1) / (horizon * n_steps)
        g2 = slots.mean_of_squares(grad, v.shape)
        v = beta * v + (1 - beta) * g2
        unbiased = v / (1 - jnp.asarray(beta, jnp.float32) ** count)
        # A gradient above the running mean is clipped to it, slot by slot.
        norm = jnp.maximum(jnp.maximum(unbiased, g2), epsilon)
        root = jnp.sqrt(1 + b)
        bv = jnp.square(2 * root / (1 + jnp.sqrt(1 + 2 / (2 + tau) * root))) - 1
        decay = xi2 / (2 * root) * g2 / norm
        rate = eta * math.sqrt(xi2) * jax.lax.rsqrt(norm)
        delta = -(decay * theta + rate * grad) / (1 + eta * root * bv)
        b = b + xi2 / root * (1 / math.sqrt(k) + b)
        return delta.astype(jnp.result_type(g)), v, b

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, transform.ScaleByAmosState]:
        if params is None:
            raise ValueError("Amos needs params: call update(grads, state, params).")
        state = state._replace(count=optax.safe_increment(state.count))
        update_one = functools.partial(update_param, state.count)
        return transform.map_slots(update_one, updates, state, params)

    init = functools.partial(transform.init_slots, eta_fn, shape_fn)
    return optax.GradientTransformation(init, update)


def _tau(s: float) -> float:
    q = math.sqrt(1 - 1 / s)
    return q * math.log(s * (1 + q) ** 2)
