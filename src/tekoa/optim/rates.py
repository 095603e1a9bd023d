"""Learning rates that can be read during training: `rated` stores, `current_rates` reads."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tekoa.core import trees
from tekoa.optim.amos import transform
from tekoa.optim.triples import schedules


class FrozenState(NamedTuple):
    """The empty state of a frozen group."""


def freeze() -> optax.GradientTransformation:
    """Creates a transformation that leaves parameters unchanged.

    Unlike with `optax.set_to_zero`, `current_rates` can report the rate, which is 0.

    >>> freeze().update({'w': 3.0}, freeze().init({'w': 1.0}))[0]
    {'w': Array(0., dtype=float32, weak_type=True)}
    """

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, FrozenState]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(lambda params: FrozenState(), update)


class RatedState(NamedTuple):
    """The state of a transformation and its learning rate."""

    count: Any  # Completed updates, an int32 array.
    rate: jax.Array  # Of the last update; initially, of the first one.
    inner: Any  # The transformation's own state.


def rated(
    make: Callable[..., optax.GradientTransformation],
    learning_rate: schedules.ScalarOrSchedule,
    *,
    first_count: int | None = None,
    **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
    """Creates `make(learning_rate, **kwargs)` with a rate that `current_rates` can read.

    Args:
        make: Creates a transformation from a learning rate, like `optax.adamw`.
        learning_rate: A number, or a schedule of the update count.
        first_count: The count that `make` passes to the schedule in the first update. None
            means 1 for Amos, which counts the current update, and 0 as in optax otherwise.
        **kwargs: Passed to `make`.

    >>> tx = rated(optax.sgd, optax.linear_schedule(1.0, 0.0, 4))
    >>> params = {'w': jnp.ones(())}
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update(params, state)
    >>> float(updates['w']), float(current_rates(state)['all'])
    (-0.75, 0.75)
    """
    tx = optax.with_extra_args_support(make(learning_rate, **kwargs))
    rate_at = schedules.make_schedule(learning_rate)
    if first_count is None:
        maker = make.func if isinstance(make, functools.partial) else make
        first_count = int(maker in (transform.amos, transform.scale_by_amos))

    def rate_of(count: jax.Array) -> jax.Array:
        return jnp.asarray(rate_at(count + first_count), jnp.float32)

    def init(params: trees.PyTree) -> RatedState:
        count = jnp.zeros((), jnp.int32)
        return RatedState(count, rate_of(count), tx.init(params))

    def update(
        updates: trees.PyTree, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[trees.PyTree, RatedState]:
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        count = optax.safe_increment(state.count)
        return updates, RatedState(count, rate_of(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def current_rates(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Reads the learning rate of every group from an optimizer state.

    Finds the rates of `rated`, of `optax.inject_hyperparams` ('learning_rate') and of frozen
    groups, also inside chains, `optax.MultiSteps` and nested groups.

    Args:
        opt_state: The state of any transformation.

    Returns:
        Group to rate, on the device: reading one waits for the step. A rate outside of all
        groups is named 'all', that of a nested group 'outer/inner'. Groups with other
        transformations are omitted.

    >>> tx = optax.partition(
    ...     {'a': freeze(), 'b': rated(optax.adam, 0.5)}, {'bias': 'a', 'kernel': 'b'})
    >>> state = tx.init({'bias': 1.0, 'kernel': 1.0})
    >>> {group: float(rate) for group, rate in current_rates(state).items()}
    {'a': 0.0, 'b': 0.5}
    """
    rates = {}
    leaves = jax.tree.leaves_with_path(opt_state, is_leaf=lambda node: _rate(node) is not None)
    for path, node in leaves:
        if (rate := _rate(node)) is not None:
            rates.setdefault(_group(path), rate)
    return rates


def _rate(node: Any) -> Any:
    if isinstance(node, FrozenState):
        return jnp.zeros((), jnp.float32)
    if isinstance(node, RatedState):
        return jax.tree.leaves(node.rate)[0]
    hyperparams = getattr(node, "hyperparams", None)
    if isinstance(hyperparams, dict) and "learning_rate" in hyperparams:
        return jax.tree.leaves(hyperparams["learning_rate"])[0]
    return None


def _group(path: tuple[Any, ...]) -> str:
    """Joins the labels of `optax.partition` along the path to a state."""
    inner_states = jax.tree_util.GetAttrKey("inner_states")
    labels = [str(key.key) for before, key in itertools.pairwise(path) if before == inner_states]
    return "/".join(labels) or "all"
