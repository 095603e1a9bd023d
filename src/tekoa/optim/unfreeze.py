"""Parameters that begin to train later than others."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tekoa.core import rules, trees
from tekoa.optim import groups

# Where learning rates depend on the step of training, not on that of the parameter.
_CLOCKS = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)


class UnfreezeState(NamedTuple):
    """The state of `unfreeze_at`."""

    n_updates: jax.Array  # Updates so far.
    inner: Any  # The state of the optimizer, by the update at which its parameters begin to train.


def unfreeze_at(
    optimizer: optax.GradientTransformation, table: Mapping[str, int]
) -> optax.GradientTransformationExtraArgs:
    """Creates an optimizer that leaves some parameters unchanged for a number of updates.

    Until then they have no update and no weight decay, and their slots stay as they were, also
    the counts by which an optimizer corrects for its first steps. Schedules of learning rates
    follow the updates of training. Parameters that begin at different times are separate groups
    for what an optimizer computes over all of them, such as the norm of a clipping.

    Args:
        optimizer: Any optax transformation.
        table: Pattern, searched in the names of parameters, to the number of updates before the
            first one; the first match wins. Other parameters train from the start.

    Returns:
        The optimizer. `init` warns with `UnusedRuleWarning` of patterns that match no parameter.

    Raises:
        ValueError: If a number is not a positive whole number.

    >>> tx = unfreeze_at(optax.sgd(1.0), {'^body': 1})
    >>> params = {'body': jnp.zeros(()), 'head': jnp.zeros(())}
    >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    >>> for _ in range(2):
    ...     updates, state = tx.update(grads, state, params)
    ...     print({name: float(update) for name, update in updates.items()})
    {'body': -0.0, 'head': -1.0}
    {'body': -1.0, 'head': -1.0}
    """
    for pattern, at in table.items():
        if isinstance(at, bool) or not isinstance(at, int) or at < 1:
            raise ValueError(
                f"unfreeze_at[{pattern!r}] must be a number of updates from 1 up, got {at!r}."
            )
    starts = {str(at): at for at in sorted({0, *table.values()})}
    tx = groups.restrict_grad(optimizer)

    def labels(tree: trees.PyTree) -> trees.PyTree:
        return rules.map_rules({**{p: str(at) for p, at in table.items()}, "": "0"}, tree)

    transforms: dict[Hashable, optax.GradientTransformation] = dict.fromkeys(starts, tx)
    partition = optax.partition(transforms, labels)

    def init(params: trees.PyTree) -> UnfreezeState:
        names = rules.map_rules({**{p: p for p in table}, "": ""}, params)
        groups.warn_unused({p: p for p in table}, set(jax.tree.leaves(names)))
        return UnfreezeState(jnp.zeros((), jnp.int32), partition.init(params))

    def update(
        updates: trees.PyTree,
        state: Any,
        params: trees.PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[trees.PyTree, UnfreezeState]:
        if "value_fn" in extra_args and params is not None:
            value_fn = extra_args["value_fn"]
            extra_args["value_fn"] = lambda group: value_fn(groups.fill_in(group, params))
        inner: Any
        changes, inner = partition.update(updates, state.inner, params, **extra_args)
        is_frozen = {label: state.n_updates < at for label, at in starts.items()}
        held = {
            label: _hold(is_frozen[label], state.inner.inner_states[label], new) if at else new
            for (label, at), new in zip(
                starts.items(), (inner.inner_states[label] for label in starts), strict=True
            )
        }
        changes = jax.tree.map(
            # Adding -0.0 changes no bit of any number.
            lambda label, x: (
                jnp.where(is_frozen[label], -jnp.zeros_like(x), x) if starts[label] else x
            ),
            labels(changes),
            changes,
        )
        return changes, UnfreezeState(state.n_updates + 1, inner._replace(inner_states=held))

    return optax.GradientTransformationExtraArgs(init, update)


def _hold(is_frozen: jax.Array, old: Any, new: Any) -> Any:
    """Returns the old state while parameters are frozen, except for the time of schedules."""

    def is_clock(node: Any) -> bool:
        return isinstance(node, _CLOCKS)

    def choose(a: Any, b: Any) -> Any:
        if isinstance(b, optax.ScaleByScheduleState):
            return b
        if is_clock(b):
            return b._replace(inner_state=_hold(is_frozen, a.inner_state, b.inner_state))
        return jnp.where(is_frozen, a, b)

    return jax.tree.map(choose, old, new, is_leaf=is_clock)
