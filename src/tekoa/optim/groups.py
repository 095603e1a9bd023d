"""Optimizers, rates, freezing and masks by parameter group, from one rule table.

A group is the leaves whose name a regex is found in; the first of the table wins. The
same table serves Linen, NNX, Equinox and dict trees, since leaves are named alike.
"""

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tekoa.core import rules, trees
from tekoa.optim import amos, schedules

GroupValue = optax.GradientTransformation | optax.MultiSteps | Literal["freeze"] | None


class UnusedRuleWarning(UserWarning):
    """A pattern of a rule table was found in no parameter's name."""


def groups(table: Mapping[str, GroupValue]) -> optax.GradientTransformationExtraArgs:
    """Makes one transformation that treats each group of parameters its own way.

    Args:
        table: Pattern to transformation, in order; None or 'freeze' keeps a group as it
            is and spends no memory on it. A pattern may match anywhere in the name:
            'kernel$' means every kernel.

    Returns:
        A transformation; the names of the groups in its state are the patterns. `init`
        raises `NoRuleError` with the parameters that are in no group, and warns with
        `UnusedRuleWarning` of patterns that no parameter is left for.

    Raises:
        TypeError: If a value is neither a transformation nor a freeze.

    >>> tx = groups({'bias$': 'freeze', 'kernel$': optax.sgd(0.5)})
    >>> params = {'dense': {'kernel': jnp.ones(1), 'bias': jnp.ones(1)}}
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> updates['dense']
    {'bias': Array([0.], dtype=float32), 'kernel': Array([-0.5], dtype=float32)}
    """
    transforms = {pattern: _transform(pattern, value) for pattern, value in table.items()}
    patterns = {pattern: pattern for pattern in transforms}

    def labels(tree: trees.PyTree) -> trees.PyTree:
        return rules.map_rules(patterns, tree)

    partition = optax.partition(transforms, labels)

    def init(params: trees.PyTree) -> optax.OptState:
        _report_unused(patterns, set(jax.tree.leaves(labels(params))))
        return partition.init(params)

    return optax.GradientTransformationExtraArgs(init, partition.update)


class FrozenState(NamedTuple):
    """The state of a frozen group: nothing."""


def freeze() -> optax.GradientTransformation:
    """Makes the transformation that leaves parameters as they are.

    Unlike `optax.set_to_zero`, `current_rates` knows it, and reports the rate 0.

    >>> freeze().update({'w': 3.0}, freeze().init({'w': 1.0}))[0]
    {'w': Array(0., dtype=float32, weak_type=True)}
    """

    def update(
        updates: trees.PyTree, state: FrozenState, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, FrozenState]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(lambda params: FrozenState(), update)


def _transform(pattern: str, value: Any) -> optax.GradientTransformation:
    if value is None or value == "freeze":
        return freeze()
    if isinstance(value, optax.MultiSteps):
        return optax.GradientTransformation(value.init, value.update)
    if isinstance(value, optax.GradientTransformation):
        return value
    raise TypeError(
        f"Group {pattern!r} must have an optax transformation, 'freeze' or None, got {value!r}."
    )


def _report_unused(patterns: Mapping[str, str], used: set[str]) -> None:
    unused = [pattern for pattern in patterns if pattern not in used]
    # A tree without parameters, as optax.tree_map_params makes, says nothing.
    if used and unused:
        warnings.warn(
            f"No parameter is in group {', '.join(map(repr, unused))}: the pattern is found in no "
            "name, or a pattern above it takes all. Remove it or correct it.",
            UnusedRuleWarning,
            stacklevel=3,
        )


def mask(table: Mapping[str, bool]) -> Callable[[trees.PyTree], trees.PyTree]:
    """Makes a function of a tree that gives the table's value for every leaf.

    Args:
        table: Pattern to whether, say, weights decay; in order, as in `groups`.

    Returns:
        What `optax.adamw(mask=...)` and `optax.masked` take.

    >>> tx = optax.adamw(1e-3, mask=mask({'(bias|scale)$': False, '.*': True}))
    >>> mask({'bias$': False, '.*': True})({'dense': {'kernel': 0, 'bias': 0}})
    {'dense': {'bias': False, 'kernel': True}}
    """
    return lambda tree: rules.map_rules(table, tree)


class RatedState(NamedTuple):
    """The state of a transformation, and what its learning rate was."""

    count: jax.Array  # Completed updates, int32.
    rate: jax.Array  # Of the last update; before the first, the rate it will have.
    inner: Any  # The transformation's own state.


def rated(
    make: Callable[..., optax.GradientTransformation],
    learning_rate: schedules.ScalarOrSchedule,
    *,
    first_count: int | None = None,
    **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
    """Makes `make(learning_rate, **kwargs)`, with its rate readable by `current_rates`.

    Args:
        make: Makes a transformation from a learning rate, as `optax.adamw` does.
        learning_rate: A number, or a schedule of the count of updates.
        first_count: What `make` calls the schedule with in the first update. None: 1 for
            Amos, which counts the update it is in, else 0, as all of optax does.
        **kwargs: Handed to `make`.

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
        first_count = int(make in (amos.amos, amos.scale_by_amos))

    def rate_of(count: jax.Array) -> jax.Array:
        return jnp.asarray(rate_at(count + first_count), jnp.float32)

    def init(params: trees.PyTree) -> RatedState:
        count = jnp.zeros((), jnp.int32)
        return RatedState(count, rate_of(count), tx.init(params))

    def update(
        updates: trees.PyTree, state: RatedState, params: Any = None, **extra_args: Any
    ) -> tuple[trees.PyTree, RatedState]:
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        count = optax.safe_increment(state.count)
        return updates, RatedState(count, rate_of(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def current_rates(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Reads the learning rate of every group out of an optimizer state.

    Known are the rates of `rated`, of `optax.inject_hyperparams` (its 'learning_rate')
    and of frozen groups, also inside chains, `optax.MultiSteps` and nested groups.

    Args:
        opt_state: The state of any transformation.

    Returns:
        Group to rate, on the device: reading one waits for the step. A rate outside all
        groups is called 'all', that of a group in a group 'outer/inner'. Groups made in
        another way are left out.

    >>> tx = groups({'bias$': None, '.*': rated(optax.adam, 0.5)})
    >>> state = tx.init({'bias': 1.0, 'kernel': 1.0})
    >>> {group: float(rate) for group, rate in current_rates(state).items()}
    {'.*': 0.5, 'bias$': 0.0}
    """
    found, _ = jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=lambda node: _rate(node) is not None
    )
    rates = {}
    for path, node in found:
        rate = _rate(node)
        if rate is not None:
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
    """Joins the labels of `optax.partition` on the way to a state."""
    inside = jax.tree_util.GetAttrKey("inner_states")
    labels = [str(key.key) for before, key in itertools.pairwise(path) if before == inside]
    return "/".join(labels) or "all"
