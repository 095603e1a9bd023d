"""Optimizers, freezing and masks by parameter group, from one rule table.

A group is the leaves whose name a regex is found in; the first of the table wins. The
same table serves Linen, NNX, Equinox and dict trees, since leaves are named alike.
"""

import logging
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from tekoa.core import rules, trees
from tekoa.optim import rates, schedules

GroupValue = (
    optax.GradientTransformation
    | optax.MultiSteps
    | schedules.ScalarOrSchedule
    | Literal["freeze"]
    | None
)

_log = logging.getLogger("tekoa")


class UnusedRuleWarning(UserWarning):
    """A pattern of a rule table was found in no parameter's name."""


def groups(
    table: Mapping[str, GroupValue], make: Callable[..., Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes one transformation that treats each group of parameters its own way.

    A line search in a group, such as LBFGS, looks along that group's parameters; it takes
    all others as they were before the step.

    Args:
        table: Pattern to transformation, in order; None or 'freeze' keeps a group as it
            is and spends no memory on it. A pattern may match anywhere in the name:
            'kernel$' means every kernel.
        make: Makes a transformation from a learning rate, as `optax.adam` does; with it, a
            number or a schedule in the table stands for `rated(make, number)`.

    Returns:
        A transformation; the names of the groups in its state are the patterns. `init`
        raises `NoRuleError` with the parameters that are in no group, and warns with
        `UnusedRuleWarning` of patterns that no parameter is left for.

    Raises:
        TypeError: If a value is neither a transformation nor a freeze, or it is a rate and
            there is no `make`.

    >>> tx = groups({'bias$': 'freeze', 'kernel$': 0.5}, make=optax.sgd)
    >>> params = {'dense': {'kernel': jnp.ones(1), 'bias': jnp.ones(1)}}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates['dense']
    {'bias': Array([0.], dtype=float32), 'kernel': Array([-0.5], dtype=float32)}
    >>> {group: float(rate) for group, rate in rates.current_rates(state).items()}
    {'bias$': 0.0, 'kernel$': 0.5}
    """
    transforms: dict[Hashable, optax.GradientTransformation] = {
        pattern: _in_group(_transform(pattern, value, make)) for pattern, value in table.items()
    }
    patterns = {pattern: pattern for pattern in table}

    def labels(tree: trees.PyTree) -> trees.PyTree:
        return rules.map_rules(patterns, tree)

    partition = optax.partition(transforms, labels)

    def init(params: trees.PyTree) -> optax.OptState:
        used = set(jax.tree.leaves(labels(params)))
        _report_unused(patterns, used)
        state = partition.init(params)
        _report_silent(used, rates.current_rates(state))
        return state

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None, **extra_args: Any
    ) -> tuple[trees.PyTree, Any]:
        if "value_fn" in extra_args and params is not None:
            value_fn = extra_args["value_fn"]
            extra_args["value_fn"] = lambda group: value_fn(_filled(group, params))
        return partition.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_group(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Hands a group its own part of the gradients, where they are an extra argument."""
    tx = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if "grad" in extra_args:
            extra_args["grad"] = jax.tree.map(
                lambda own, grad: own if _is_masked(own) else grad,
                updates,
                extra_args["grad"],
                is_leaf=_is_masked,
            )
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _filled(group: trees.PyTree, params: trees.PyTree) -> trees.PyTree:
    """The group's parameters, with all others as they are."""
    return jax.tree.map(
        lambda own, other: other if _is_masked(own) else own, group, params, is_leaf=_is_masked
    )


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _transform(
    pattern: str, value: Any, make: Callable[..., Any] | None
) -> optax.GradientTransformation:
    if value is None or value == "freeze":
        return rates.freeze()
    if isinstance(value, optax.MultiSteps):
        return value.gradient_transformation()
    if isinstance(value, optax.GradientTransformation):
        return value
    is_rate = callable(value) or jnp.isscalar(value)
    if make is not None and is_rate:
        return rates.rated(make, value)
    hint = " Rates need a `make`: groups(table, make=optax.adam)." if is_rate else ""
    raise TypeError(
        f"Group {pattern!r} must have an optax transformation, 'freeze' or None, got {value!r}."
        f"{hint}"
    )


def _report_unused(patterns: Mapping[str, str], used: set[str]) -> None:
    # A last rule for the rest is no mistake where nothing is left.
    unused = [p for p in patterns if p not in used and p not in ("", ".*")]
    # A tree without parameters, as optax.tree_map_params makes, says nothing.
    if used and unused:
        warnings.warn(
            f"No parameter is in group {', '.join(map(repr, unused))}: the pattern is found in no "
            "name, or a pattern above it takes all. Remove it or correct it.",
            UnusedRuleWarning,
            stacklevel=3,
        )


def _report_silent(used: set[str], known: Mapping[str, Any]) -> None:
    told = {group.split("/")[0] for group in known} | set(known)
    if silent := [pattern for pattern in sorted(used) if pattern not in told]:
        _log.info(
            "The rate of group %s is not logged: its transformation does not tell it. "
            "rated(optax.adam, rate) does, and so do rates in groups(table, make=optax.adam).",
            ", ".join(map(repr, silent)),
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
