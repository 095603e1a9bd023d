"""What Amos is told of each parameter: its scale, and the shape of its slots."""

from typing import Any

import jax
import numpy as np

from tekoa.core import rules, trees


def eta_of(eta_fn: rules.ParamsFn, name: trees.Name, shape: tuple[int, ...]) -> Any:
    """Gives the scale of a parameter, as a numpy array that broadcasts to it.

    Raises:
        ValueError: If it does not broadcast, or is negative or not finite.

    >>> eta_of(lambda name, shape: 0.5, ('w',), (2, 3))
    array(0.5)
    """
    with jax.ensure_compile_time_eval():  # It may compute with jnp, also under jit.
        eta = np.asarray(eta_fn(name, shape))
    values = eta.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(
            f"The scale (eta) of {'/'.join(name)!r} of shape {shape} must be finite and not "
            f"negative, got {eta}."
        )
    if not _broadcasts(values.shape, shape):
        raise ValueError(
            f"The scale (eta) of {'/'.join(name)!r} has shape {values.shape}, which does not "
            f"broadcast to the variable's {shape}."
        )
    return eta


def slot_shape_of(
    shape_fn: rules.ParamsFn | None, name: trees.Name, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Gives the shape of a parameter's slots; without `shape_fn`, its own.

    Raises:
        ValueError: If the shape does not broadcast to the parameter's.

    >>> slot_shape_of(lambda name, shape: (1, *shape[1:]), ('w',), (2, 3))
    (1, 3)
    """
    if shape_fn is None:
        return shape
    wanted = shape_fn(name, shape)
    slot_shape = tuple(wanted) if isinstance(wanted, (tuple, list)) else None
    if slot_shape is None or not _broadcasts(slot_shape, shape):
        raise ValueError(
            f"The slot shape of {'/'.join(name)!r} must broadcast to the variable's {shape} "
            f"(same axes or 1, or () for one number), got {wanted!r}."
        )
    return slot_shape


def _broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    if len(small) > len(large):
        return False
    return all(m in (1, n) for m, n in zip(small[::-1], large[::-1]))
