"""The optimizers of early JAX, as init/update/get_params triples.

In float32 each one is bit-for-bit the same as its namesake in `jax.example_libraries`. For
smaller floats the slots are float32. `step_size` is a number or a function of the step
index, which starts at 0.

>>> init, update, get_params = momentum(0.1, mass=0.9)
>>> opt_state = init({'w': jnp.float32(1.0)})
>>> for step in range(100):
...     grads = jax.grad(lambda params: params['w'] ** 2)(get_params(opt_state))
...     opt_state = update(step, grads, opt_state)
>>> bool(abs(get_params(opt_state)['w']) < 0.02)
True
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.optim.triples.packed import (
    Array,
    InitFn,
    JoinPoint,
    Optimizer,
    OptimizerState,
    Params,
    ParamsFn,
    State,
    Step,
    UpdateFn,
    Updates,
    optimizer,
    pack_optimizer_state,
    unpack_optimizer_state,
)
from tekoa.optim.triples.schedules import (
    ScalarOrSchedule,
    Schedule,
    constant,
    exponential_decay,
    inverse_time_decay,
    make_schedule,
    piecewise_constant,
    polynomial_decay,
)

# fmt: off
__all__ = [
    "Array", "InitFn", "JoinPoint", "Optimizer", "OptimizerState", "Params", "ParamsFn", "Schedule",
    "State", "Step", "UpdateFn", "Updates", "adagrad", "adam", "adamax", "clip_grads",
    "constant", "exponential_decay", "inverse_time_decay", "l2_norm", "make_schedule", "momentum",
    "nesterov", "optimizer", "pack_optimizer_state", "piecewise_constant", "polynomial_decay",
    "rmsprop", "rmsprop_momentum", "sgd", "sm3", "unpack_optimizer_state",
]
# fmt: on

# The order of operations determines the bits: it is that of jax.example_libraries.


@optimizer
def sgd(step_size: ScalarOrSchedule) -> Any:
    """Creates plain gradient descent.

    >>> init, update, get_params = sgd(0.5)
    >>> float(get_params(update(0, 2.0, init(1.0))))
    0.0
    """
    rate = make_schedule(step_size)
    return lambda x: x, lambda i, g, x: _subtract(x, rate(i) * trees.widen(g)), lambda x: x


@optimizer
def momentum(step_size: ScalarOrSchedule, mass: float) -> Any:
    """Creates gradient descent with momentum: a decaying sum of gradients.

    >>> init, update, get_params = momentum(0.5, mass=0.9)
    >>> float(get_params(update(0, 2.0, init(1.0))))
    0.0
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, velocity: Any) -> Any:
        velocity = mass * velocity + g
        return _subtract(x, rate * velocity), velocity

    return _triple(step_size, _with_slots(1), update)


@optimizer
def nesterov(step_size: ScalarOrSchedule, mass: float) -> Any:
    """Creates gradient descent with Nesterov momentum.

    >>> init, update, get_params = nesterov(0.5, mass=0.5)
    >>> float(get_params(update(0, 2.0, init(1.0))))
    -0.5
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, velocity: Any) -> Any:
        velocity = mass * velocity + g
        return _subtract(x, rate * (mass * velocity + g)), velocity

    return _triple(step_size, _with_slots(1), update)


@optimizer
def adagrad(step_size: ScalarOrSchedule, momentum: float = 0.9) -> Any:
    """Creates Adagrad with momentum: rates decrease with the sum of squared gradients.

    >>> init, update, get_params = adagrad(0.5, momentum=0.0)
    >>> float(get_params(update(0, 2.0, init(1.0))))
    0.5
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, total: Any, m: Any) -> Any:
        total = total + jnp.square(g)
        m = (1.0 - momentum) * (g * _inverse_root(total)) + momentum * m
        return _subtract(x, rate * m), total, m

    return _triple(step_size, _with_slots(2), update)


@optimizer
def rmsprop(step_size: ScalarOrSchedule, gamma: float = 0.9, eps: float = 1e-8) -> Any:
    """Creates RMSProp: gradients are divided by the root of their running mean square.

    >>> init, update, get_params = rmsprop(0.5, gamma=0.0)
    >>> float(get_params(update(0, 2.0, init(1.0))))
    0.5
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, mean_square: Any) -> Any:
        mean_square = mean_square * gamma + jnp.square(g) * (1.0 - gamma)
        return _subtract(x, rate * g / jnp.sqrt(mean_square + eps)), mean_square

    return _triple(step_size, _with_slots(1), update)


@optimizer
def rmsprop_momentum(
    step_size: ScalarOrSchedule, gamma: float = 0.9, eps: float = 1e-8, momentum: float = 0.9
) -> Any:
    """Creates RMSProp with momentum: a decaying sum of its steps.

    >>> init, update, get_params = rmsprop_momentum(0.5, gamma=0.0)
    >>> float(get_params(update(0, 2.0, init(1.0))))
    0.5
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, mean_square: Any, m: Any) -> Any:
        mean_square = mean_square * gamma + jnp.square(g) * (1.0 - gamma)
        m = momentum * m + rate * g / jnp.sqrt(mean_square + eps)
        return _subtract(x, m), mean_square, m

    return _triple(step_size, _with_slots(2), update)


@optimizer
def adam(step_size: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Any:
    """Creates Adam.

    >>> init, update, get_params = adam(0.5)
    >>> print(f'{get_params(update(0, 2.0, init(1.0))):.4f}')
    0.5000
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, m: Any, v: Any) -> Any:
        m = (1 - b1) * g + b1 * m
        v = (1 - b2) * jnp.square(g) + b2 * v
        unbiased_m = m / (1 - jnp.asarray(b1, m.dtype) ** (i + 1))
        unbiased_v = v / (1 - jnp.asarray(b2, m.dtype) ** (i + 1))
        return _subtract(x, rate * unbiased_m / (jnp.sqrt(unbiased_v) + eps)), m, v

    return _triple(step_size, _with_slots(2), update)


@optimizer
def adamax(
    step_size: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> Any:
    """Creates AdaMax: Adam with the decayed maximum in place of the mean square.

    >>> init, update, get_params = adamax(0.5)
    >>> print(f'{get_params(update(0, 2.0, init(1.0))):.4f}')
    0.5000
    """

    def update(i: Any, rate: Any, g: jax.Array, x: Any, m: Any, u: Any) -> Any:
        m = (1 - b1) * g + b1 * m
        u = jnp.maximum(b2 * u, jnp.abs(g))
        unbias = 1 - jnp.asarray(b1, m.dtype) ** (i + 1)
        return _subtract(x, (rate / unbias) * m / (u + eps)), m, u

    return _triple(step_size, _with_slots(2), update)


@optimizer
def sm3(step_size: ScalarOrSchedule, momentum: float = 0.9) -> Any:
    """Creates SM3: Adagrad that stores one vector per axis.

    >>> init, update, get_params = sm3(0.5, momentum=0.0)
    >>> opt_state = update(0, jnp.ones((2, 3)), init(jnp.ones((2, 3))))
    >>> [leaf.shape for leaf in jax.tree.leaves(opt_state)]  # Parameter, momentum, axes.
    [(2, 3), (2, 3), (2,), (3,)]
    """

    def init(x: jax.Array) -> Any:
        return x, _zeros(x), [jnp.zeros(n, trees.wide_dtype(x)) for n in jnp.atleast_1d(x).shape]

    # JAX's own states end with the shape of the parameter; it is kept in them. A scalar is
    # stored there as an array with one axis.
    def update(i: Any, rate: Any, g: jax.Array, x: Any, m: Any, axis_maxima: Any, *shape: Any):
        g = jnp.atleast_1d(g)
        bounds = [_along(v, j, g.ndim) for j, v in enumerate(axis_maxima)]
        total = functools.reduce(jnp.minimum, bounds) + jnp.square(g)
        # A scalar has one axis here and none outside.
        old_m = jnp.atleast_1d(m)
        new_m = (1.0 - momentum) * (g * _inverse_root(total)) + momentum * old_m
        x = _subtract(jnp.atleast_1d(x), rate * new_m).reshape(jnp.shape(x))
        maxima = [_axis_maximum(total, j) for j in range(g.ndim)]
        return x, new_m.reshape(m.shape), maxima, *shape

    def get_params(state: Any) -> Any:
        return state[0].reshape(()) if state[3:] == ((),) else state[0]

    return *_triple(step_size, init, update)[:2], get_params


def _triple(step_size: ScalarOrSchedule, init: Any, update: Any) -> Any:
    """Returns a triple whose state is `x, *slots`, from `update(i, rate, g, x, *slots)`."""
    schedule = make_schedule(step_size)

    def update_state(i: Any, g: jax.Array, state: Any) -> Any:
        return update(i, schedule(i), trees.widen(g), *state)

    return init, update_state, lambda state: state[0]


def _zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x, trees.wide_dtype(x))


def _with_slots(n: int) -> Any:
    return lambda x: (x, *(_zeros(x) for _ in range(n)))


def _subtract(x: jax.Array, step: Any) -> jax.Array:
    """Computes x - step, rounded to the dtype of x."""
    return _round_like(trees.widen(x) - step, x)


def _round_like(new: jax.Array, old: Any) -> jax.Array:
    """Casts `new` to the dtype of `old` if that is a float."""
    dtype = jnp.result_type(old)
    return new.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else new


def _inverse_root(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1.0 / jnp.sqrt(x), 0.0)


def _along(v: jax.Array, axis: int, ndim: int) -> jax.Array:
    return v[tuple(slice(None) if j == axis else None for j in range(ndim))]


def _axis_maximum(x: jax.Array, axis: int) -> jax.Array:
    others = [j for j in range(x.ndim) if j != axis]
    # No entry is negative, so initial=0 matters only for an empty array. Without other axes it
    # would be one more operation, with which XLA rounds differently under jit.
    return jnp.max(x, others, initial=0) if others else x


def l2_norm(tree: trees.PyTree) -> jax.Array:
    """Computes the L2 norm of all leaves together.

    >>> float(l2_norm({'a': jnp.float32([3.0]), 'b': jnp.float32(4.0)}))
    5.0
    """
    return jnp.sqrt(sum(jnp.vdot(x, x).real for x in map(trees.widen, jax.tree.leaves(tree))))


def clip_grads(grad_tree: trees.PyTree, max_norm: float) -> trees.PyTree:
    """Scales the gradients down to the norm `max_norm` if theirs is larger.

    >>> clip_grads({'a': jnp.float32([3.0]), 'b': jnp.float32([4.0])}, 1.0)
    {'a': Array([0.6], dtype=float32), 'b': Array([0.8], dtype=float32)}
    """
    norm = l2_norm(grad_tree)

    def clip(g: jax.Array) -> jax.Array:
        wide = trees.widen(g)
        return _round_like(jnp.where(norm < max_norm, wide, wide * (max_norm / norm)), g)

    return jax.tree.map(clip, grad_tree)
