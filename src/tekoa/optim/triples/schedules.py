"""Step sizes as functions of the step index, which starts at 0.

They work with the triples of `classic` and with optax. The index may be a Python number or a
traced array.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Schedule = Callable[[Any], Any]
ScalarOrSchedule = float | jax.Array | np.ndarray | Schedule


def constant(step_size: float | jax.Array | np.ndarray) -> Schedule:
    """Returns a schedule that is `step_size` at every step.

    >>> constant(0.1)(7)
    0.1
    """
    return lambda i: step_size


def exponential_decay(step_size: float, decay_steps: float, decay_rate: float) -> Schedule:
    """Returns a schedule that decays smoothly by `decay_rate` every `decay_steps` steps.

    >>> exponential_decay(1.0, 10, 0.5)(20)
    0.25
    """
    return lambda i: step_size * decay_rate ** (i / decay_steps)


def inverse_time_decay(
    step_size: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Returns the schedule step_size / (1 + decay_rate * i / decay_steps).

    Args:
        step_size: The value at step 0.
        decay_steps: Steps over which the divisor grows by `decay_rate`.
        decay_rate: How much the divisor grows.
        staircase: Whether the divisor grows only at multiples of `decay_steps`.

    >>> inverse_time_decay(1.0, 10, 1.0)(10)
    0.5
    >>> float(inverse_time_decay(1.0, 10, 1.0, staircase=True)(19))
    0.5
    """
    if staircase:
        return lambda i: step_size / (1 + decay_rate * jnp.floor(i / decay_steps))
    return lambda i: step_size / (1 + decay_rate * i / decay_steps)


def polynomial_decay(
    step_size: float, decay_steps: float, final_step_size: float, power: float = 1.0
) -> Schedule:
    """Returns a polynomial decay from `step_size` to `final_step_size`, then constant.

    Args:
        step_size: The value at step 0.
        decay_steps: Steps until the final value.
        final_step_size: The final value.
        power: 1 is linear; a larger power decays faster at first.

    >>> float(polynomial_decay(1.0, 10, 0.5)(5))
    0.75
    """

    def schedule(i: Any) -> jax.Array:
        remaining = (1 - jnp.minimum(i, decay_steps) / decay_steps) ** power
        return remaining * (step_size - final_step_size) + final_step_size

    return schedule


def piecewise_constant(boundaries: Sequence[float], values: Sequence[float]) -> Schedule:
    """Returns a schedule that is `values[k]` if k boundaries are below the step index.

    Args:
        boundaries: The last step of every value but the last one, in increasing order.
        values: One value more than there are boundaries.

    Raises:
        ValueError: If either is not one-dimensional or the lengths do not match.

    >>> rate = piecewise_constant([10, 20], [4.0, 2.0, 1.0])
    >>> [float(rate(i)) for i in (10, 11, 20, 21)]
    [4.0, 2.0, 2.0, 1.0]
    """
    n_boundaries, n_values = np.shape(boundaries), np.shape(values)
    if len(n_boundaries) != 1 or len(n_values) != 1:
        raise ValueError(
            "boundaries and values must both be one-dimensional sequences, got shapes "
            f"{n_boundaries} and {n_values}."
        )
    if n_values[0] != n_boundaries[0] + 1:
        raise ValueError(
            f"values must be one longer than boundaries, got {n_values[0]} values and "
            f"{n_boundaries[0]} boundaries."
        )
    return lambda i: jnp.asarray(values)[jnp.sum(i > jnp.asarray(boundaries))]


def make_schedule(scalar_or_schedule: ScalarOrSchedule) -> Schedule:
    """Returns a constant schedule for a number, and a schedule unchanged.

    Args:
        scalar_or_schedule: A number, a scalar array, or a function of the step index.

    Raises:
        TypeError: If it is anything else.

    >>> make_schedule(0.5)(3)
    0.5
    """
    if callable(scalar_or_schedule):
        return scalar_or_schedule
    is_array = isinstance(scalar_or_schedule, (jax.Array, np.ndarray))
    is_scalar = is_array and np.ndim(scalar_or_schedule) == 0
    if not is_scalar and not isinstance(scalar_or_schedule, numbers.Number):
        raise TypeError(
            "A step size must be a number, a scalar array, or a function of the step index, got "
            f"{scalar_or_schedule!r} of type {type(scalar_or_schedule).__name__}."
        )
    return constant(scalar_or_schedule)
