"""Parameters that train only in a part of the run: from one update on, until another, or both."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tekoa.core import rules, trees
from tekoa.optim import groups, rates

# Where learning rates depend on the step of training, not on that of the parameter.
_CLOCKS = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState, rates.RatedState)


class NeverTrainedError(ValueError):
    """A parameter would be frozen before it begins to train."""


class FreezingState(NamedTuple):
    """The state of `freeze_on_schedule`."""

    n_updates: jax.Array  # Updates so far.
    inner: Any  # The state of the optimizer, by the updates between which its parameters train.


class _Window(NamedTuple):
    """The updates that train a parameter: number `start` and later ones, before number `end`."""

    start: int
    end: int | None

    @property
    def label(self) -> str:
        return str(self.start) if self.end is None else f"{self.start}-{self.end}"

    @property
    def trains(self) -> bool:
        return self.end is None or self.start < self.end

    @property
    def is_always(self) -> bool:
        return self == (0, None)

    def is_frozen(self, n_updates: jax.Array) -> jax.Array:
        is_early = n_updates < self.start
        return is_early if self.end is None else is_early | (n_updates >= self.end)


def freeze_on_schedule(
    optimizer: optax.GradientTransformation,
    *,
    unfreeze_at: Mapping[str, int] | None = None,
    freeze_at: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Creates an optimizer that trains some parameters only in a part of the updates.

    A parameter with `unfreeze_at` of a and `freeze_at` of b trains in b - a updates, after the
    first a. Otherwise it has no update and no weight decay, and its slots stay as they are, also
    the counts by which an optimizer corrects for its first steps. Schedules of learning rates
    follow the updates of training, except those of optimizers with one count for both, such as
    Amos. Parameters that train at different times are separate groups for what an optimizer
    computes over all of them, such as the norm of a clipping.

    Args:
        optimizer: Any optax transformation.
        unfreeze_at: Pattern, searched in the names of parameters, to the number of updates before
            the first one; the first match wins. Other parameters train from the start.
        freeze_at: Pattern to the number of updates after which parameters stay as they are.
            Others train to the end.

    Returns:
        The optimizer. `init` warns with `UnusedRuleWarning` of patterns that match no parameter,
        and raises `NeverTrainedError` for parameters that are frozen before they begin to train.

    Raises:
        ValueError: If a number is not a positive whole number.

    >>> tx = freeze_on_schedule(optax.sgd(1.0), unfreeze_at={'^body': 1}, freeze_at={'^head': 2})
    >>> params = {'body': jnp.zeros(()), 'head': jnp.zeros(())}
    >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    >>> for _ in range(3):
    ...     updates, state = tx.update(grads, state, params)
    ...     print({name: float(update) for name, update in updates.items()})
    {'body': -0.0, 'head': -1.0}
    {'body': -1.0, 'head': -1.0}
    {'body': -1.0, 'head': -0.0}
    """
    starts = _compiled("unfreeze_at", unfreeze_at)
    ends = _compiled("freeze_at", freeze_at)
    windows = {
        window.label: window
        for start in sorted({0, *(unfreeze_at or {}).values()})
        for end in (None, *sorted((freeze_at or {}).values()))
        if (window := _Window(start, end)).trains
    }

    def labels(tree: trees.PyTree) -> trees.PyTree:
        return trees.map_named(lambda name, _: _window_of(name, starts, ends).label, tree)

    by_window = groups.partition(dict.fromkeys(windows, optimizer), labels)

    def init(params: trees.PyTree) -> FreezingState:
        names = trees.leaf_names(params)
        for table in (starts, ends):
            patterns = [(pattern, pattern.pattern) for pattern, _ in table]
            used = {rules.first_match(patterns, name) or "" for name in names}
            groups.warn_unused([text for _, text in patterns], used)
        return FreezingState(jnp.zeros((), jnp.int32), by_window.init(params))

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None, **extra_args: Any
    ) -> tuple[trees.PyTree, FreezingState]:
        new: Any
        changes, new = by_window.update(updates, state.inner, params, **extra_args)
        new_states = dict(new.inner_states)
        are_frozen = {
            label: window.is_frozen(state.n_updates)
            for label, window in windows.items()
            if not window.is_always
        }
        for label, is_frozen in are_frozen.items():
            old_state = state.inner.inner_states[label]
            new_states[label] = _hold(is_frozen, old_state, new_states[label])

        def change(label: str, x: jax.Array) -> jax.Array:
            # Adding -0.0 changes no bit of any number.
            return jnp.where(are_frozen[label], -jnp.zeros_like(x), x) if label in are_frozen else x

        changes = jax.tree.map(change, labels(changes), changes)
        return changes, FreezingState(state.n_updates + 1, new._replace(inner_states=new_states))

    return optax.GradientTransformationExtraArgs(init, update)


def _compiled(argument: str, table: Mapping[str, int] | None) -> rules.Table:
    for pattern, at in (table or {}).items():
        if isinstance(at, bool) or not isinstance(at, int) or at < 1:
            raise ValueError(
                f"{argument}[{pattern!r}] must be a number of updates from 1 up, got {at!r}."
            )
    return rules.compile_rules(table or {})


def _window_of(name: trees.Name, starts: rules.Table, ends: rules.Table) -> _Window:
    window = _Window(rules.first_match(starts, name) or 0, rules.first_match(ends, name))
    if not window.trains:
        raise NeverTrainedError(
            f"Parameter {'/'.join(name)!r} would never train: it is frozen after {window.end} "
            f"updates (freeze_at), but begins only after {window.start} (unfreeze_at). Set a later "
            "freeze_at, or leave it out of training altogether."
        )
    return window


def _hold(is_frozen: jax.Array, old: Any, new: Any) -> Any:
    """Returns the old state while parameters are frozen, except for the time of schedules."""

    def is_clock(node: Any) -> bool:
        return isinstance(node, _CLOCKS)

    def choose(a: Any, b: Any) -> Any:
        if isinstance(b, optax.ScaleByScheduleState):
            return b
        if isinstance(b, rates.RatedState):
            return b._replace(inner=_hold(is_frozen, a.inner, b.inner))
        if is_clock(b):
            return b._replace(inner_state=_hold(is_frozen, a.inner_state, b.inner_state))
        return jnp.where(is_frozen, a, b)

    return jax.tree.map(choose, old, new, is_leaf=is_clock)
