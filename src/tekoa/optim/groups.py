"""Optimizers, freezing and masks by parameter group, defined by a table of patterns.

A group consists of the parameters whose name matches a regex; the first match in the table
wins. One table works for Linen, NNX, Equinox and dicts, since leaves are named alike.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from tekoa.core import rules, trees
from tekoa.optim import named, rates
from tekoa.optim.scales.table import ScaleTable
from tekoa.optim.triples import schedules

GroupValue = (
    optax.GradientTransformation
    | optax.MultiSteps
    | schedules.ScalarOrSchedule
    | Literal["freeze"]
    | str
    | None
)

_log = logging.getLogger("tekoa")


class UnusedRuleWarning(UserWarning):
    """A pattern of the table matches no parameter."""


class GroupedOptimizer(optax.GradientTransformationExtraArgs):
    """The optimizer of `param_groups`.

    It has the methods of `NamedOptimizer`, for groups whose optimizer is a name.
    """

    by_pattern: Mapping[str, named.NamedOptimizer]  # The groups with a name.
    patterns: tuple[str, ...]

    @classmethod
    def of(
        cls, init: Any, update: Any, own: Mapping[str, optax.GradientTransformation]
    ) -> "GroupedOptimizer":
        """Creates the optimizer of these groups, by pattern, from its two functions."""
        self = cls(init, update)
        self.patterns = tuple(own)
        self.by_pattern = {
            pattern: tx for pattern, tx in own.items() if isinstance(tx, named.NamedOptimizer)
        }
        return self

    def with_init(self, init: optax.TransformInitFn) -> "GroupedOptimizer":
        """Returns the same optimizer with another function that creates its state."""
        copy = GroupedOptimizer(init, self.update)
        copy.by_pattern, copy.patterns = self.by_pattern, self.patterns
        return copy

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed run needs to choose the same, as JSON values."""
        return {"groups": {pattern: tx.facts for pattern, tx in self.by_pattern.items()}}

    def resolve(
        self,
        find_table: named.FindTable,
        *,
        n_steps: int | None,
        saved: Mapping[str, Any] | None = None,
    ) -> str:
        """Chooses the optimizers; arguments and result are those of `NamedOptimizer.resolve`."""
        saved_groups = (saved or {}).get("groups", {})
        find_all = functools.cache(find_table)
        table = rules.compile_rules({pattern: pattern for pattern in self.patterns})

        def find_group(pattern: str) -> ScaleTable:
            rows = [row for row in find_all() if rules.first_match(table, row.name) == pattern]
            return ScaleTable(rows, depth=find_all().depth)

        return " ".join(
            f"Group {pattern!r}: "
            + tx.resolve(
                functools.partial(find_group, pattern),
                n_steps=n_steps,
                saved=saved_groups.get(pattern),
            )
            for pattern, tx in self.by_pattern.items()
        )


def param_groups(
    table: Mapping[str, GroupValue], make: Callable[..., Any] | None = None
) -> GroupedOptimizer:
    """Creates a transformation that handles each group of parameters separately.

    A line search within a group, such as that of LBFGS, varies only the group's parameters;
    all others keep their values from before the step.

    Args:
        table: Pattern to transformation, in order. None or 'freeze' leaves a group unchanged
            and uses no memory for it. A name such as 'auto' is resolved by the training loop.
            A pattern may match anywhere in the name: 'kernel$' selects every kernel.
        make: Creates a transformation from a learning rate, like `optax.adam`. With it, a
            number or a schedule in the table stands for `rated(make, number)`.

    Returns:
        A transformation whose state names the groups by their patterns. `init` raises
        `NoRuleError` if a parameter is in no group, and warns with `UnusedRuleWarning` of
        patterns that select no parameter.

    Raises:
        TypeError: If a value is neither a transformation nor 'freeze' nor None, or is a
            learning rate without `make`.

    >>> tx = param_groups({'bias$': 'freeze', 'kernel$': 0.5}, make=optax.sgd)
    >>> params = {'dense': {'kernel': jnp.ones(1), 'bias': jnp.ones(1)}}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates['dense']
    {'bias': Array([0.], dtype=float32), 'kernel': Array([-0.5], dtype=float32)}
    >>> {group: float(rate) for group, rate in rates.current_rates(state).items()}
    {'bias$': 0.0, 'kernel$': 0.5}
    """
    own = {pattern: _transform(pattern, value, make) for pattern, value in table.items()}
    labels = functools.partial(rules.map_rules, {pattern: pattern for pattern in table})
    by_group = partition(own, labels)

    def init(params: trees.PyTree) -> optax.OptState:
        used = set(jax.tree.leaves(labels(params)))
        warn_unused(table, used)
        state = by_group.init(params)
        _log_unreadable_rates(used, rates.current_rates(state))
        return state

    return GroupedOptimizer.of(init, by_group.update, own)


groups = param_groups  # The former name.


def by_name(optimizer: Any) -> named.NamedOptimizer | GroupedOptimizer | None:
    """Returns an optimizer that is, or has groups that are, chosen by name; otherwise None."""
    if isinstance(optimizer, named.NamedOptimizer):
        return optimizer
    return optimizer if isinstance(optimizer, GroupedOptimizer) and optimizer.by_pattern else None


def partition(
    transforms: Mapping[str, optax.GradientTransformation],
    labels: Callable[[trees.PyTree], trees.PyTree],
) -> optax.GradientTransformationExtraArgs:
    """Creates `optax.partition(transforms, labels)`, whose groups can search along a line.

    The extra arguments `grad` and `value_fn` are restricted to the group; parameters of other
    groups have their values from before the step.
    """
    restricted: dict[Hashable, Any] = {
        label: _restrict_grad(tx) for label, tx in transforms.items()
    }
    inner = optax.partition(restricted, labels)

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None, **extra_args: Any
    ) -> tuple[trees.PyTree, Any]:
        if "value_fn" in extra_args and params is not None:
            value_fn = extra_args["value_fn"]
            extra_args["value_fn"] = lambda group: value_fn(_fill_in(group, params))
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _restrict_grad(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Restricts the extra argument `grad`, if there is one, to the group's own gradients."""
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


def _fill_in(group: trees.PyTree, params: trees.PyTree) -> trees.PyTree:
    """Returns `params` with the group's values in place of its own."""
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
    if isinstance(value, str):
        try:
            return named.NamedOptimizer(value)
        except ValueError as error:
            raise TypeError(
                f"Group {pattern!r} must have an optimizer or 'freeze', got {value!r}. {error}"
            ) from None
    if isinstance(value, optax.MultiSteps):
        return value.gradient_transformation()
    if isinstance(value, optax.GradientTransformation):
        return value
    is_rate = callable(value) or jnp.isscalar(value)
    if make is not None and is_rate:
        return rates.rated(make, value)
    hint = " Rates need `make`: param_groups(table, make=optax.adam)." if is_rate else ""
    raise TypeError(
        f"Group {pattern!r} must have an optax transformation, a name such as 'auto', 'freeze' or "
        f"None, got {value!r}."
        f"{hint}"
    )


def warn_unused(patterns: Iterable[str], used: set[str]) -> None:
    """Warns of patterns that select no parameter."""
    # A catch-all for which no parameter is left is not a mistake.
    unused = [p for p in patterns if p not in used and p not in ("", ".*")]
    # optax.tree_map_params calls init with a tree without parameters.
    if used and unused:
        warnings.warn(
            f"No parameter is in group {', '.join(map(repr, unused))}: the pattern matches no "
            "name, or earlier patterns match all of them first. Correct or remove it.",
            UnusedRuleWarning,
            stacklevel=3,
        )


def _log_unreadable_rates(used: set[str], current: Mapping[str, Any]) -> None:
    readable = {group.split("/")[0] for group in current} | set(current)
    if unreadable := [pattern for pattern in sorted(used) if pattern not in readable]:
        _log.info(
            "The learning rate of group %s is not logged because its transformation does not "
            "expose it. Use rated(optax.adam, rate), or rates in "
            "param_groups(table, make=optax.adam).",
            ", ".join(map(repr, unreadable)),
        )


def mask_by_name(table: Mapping[str, bool]) -> Callable[[trees.PyTree], trees.PyTree]:
    """Returns a function that maps a tree to the table's value for each leaf.

    Args:
        table: Pattern to whether the mask includes the leaf; the first match wins, as in
            `param_groups`.

    Returns:
        A mask for `optax.adamw(mask=...)` or `optax.masked`.

    >>> tx = optax.adamw(1e-3, mask=mask_by_name({'(bias|scale)$': False, '.*': True}))
    >>> mask_by_name({'bias$': False, '.*': True})({'dense': {'kernel': 0, 'bias': 0}})
    {'dense': {'bias': False, 'kernel': True}}
    """
    return lambda tree: rules.map_rules(table, tree)


mask = mask_by_name  # The former name.
