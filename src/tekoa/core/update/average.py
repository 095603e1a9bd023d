"""The average of the parameters that evaluation uses: a moving one, or an optimizer's own."""

from typing import Any

import jax
import optax
import optax.contrib

from tekoa.core.model import cast_like
from tekoa.core.trees import PyTree


class AverageError(ValueError):
    """A moving average was requested where the optimizer has an average of its own."""


def updated_average(
    average: PyTree, params: PyTree, ema: float | None, opt_state: PyTree = ()
) -> PyTree:
    """Returns the updated average: a moving one, or that of a Schedule-Free optimizer.

    It is `average` unchanged if `ema` is None and the optimizer is of another kind.
    """
    check_ema(ema, opt_state)
    if average is not None and is_schedule_free(opt_state):
        return cast_like(average, schedule_free_params(opt_state, params), "average")
    if ema is None:
        return average
    if average is None:
        raise ValueError("ema is set, but the state has no average. Use init_state(..., ema=...).")
    return moving_average(average, params, ema)


def is_schedule_free(opt_state: PyTree) -> bool:
    """Whether a Schedule-Free optimizer is part of an optimizer, such as inside a chain."""
    return bool(_schedule_free_states(opt_state))


def schedule_free_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters for evaluation.

    Parameters of other optimizers, in other groups, are returned unchanged.

    >>> tx = optax.chain(optax.clip(1.0), optax.contrib.schedule_free_sgd(0.5, b1=0.9))
    >>> params = {'w': jax.numpy.ones(())}
    >>> updates, state = tx.update({'w': jax.numpy.ones(())}, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> bool(schedule_free_params(state, params)['w'] == params['w'])
    True
    """
    for state in _schedule_free_states(opt_state):
        # Where this optimizer has no parameters, its state has an empty node.
        params = jax.tree.map(
            lambda z, p, state=state: (
                p
                if _is_empty(z)
                else optax.contrib.schedule_free_eval_params(state._replace(z=z), p)
            ),
            state.z,
            params,
            is_leaf=_is_empty,
        )
    return params


def check_ema(ema: float | None, opt_state: PyTree) -> None:
    """Raises `AverageError` if a moving average would be taken of a Schedule-Free optimizer."""
    if ema is not None and is_schedule_free(opt_state):
        raise AverageError(
            f"ema={ema} cannot be combined with a Schedule-Free optimizer, which is evaluated at "
            "an average of its own. Leave out ema."
        )


def _is_empty(node: PyTree) -> bool:
    return not jax.tree.leaves(node)


def _schedule_free_states(opt_state: PyTree) -> list[Any]:
    def is_state(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]


def moving_average(average: PyTree, params: PyTree, decay: float) -> PyTree:
    """Computes decay * average + (1 - decay) * params.

    >>> moving_average(jax.numpy.float32(1.0), jax.numpy.float32(2.0), 0.75)
    Array(1.25, dtype=float32)
    """
    return jax.tree.map(lambda a, p: (decay * a + (1 - decay) * p).astype(a.dtype), average, params)
