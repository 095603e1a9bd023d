"""Handles NaN and Inf in losses, gradients and updates.

The host runs ahead of the device, so the decision is made on the device: a bad step
leaves the state unchanged, and its record is part of the state.
"""

import math
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.core.state import Health, TrainState

OnNan = Literal["stop", "skip", "count", "ignore"]
Tree = TypeVar("Tree")


class NonFiniteError(FloatingPointError):
    """Training stopped at a NaN or Inf; the state is that of the last good step."""


def select_finite(
    old: TrainState,
    new: TrainState,
    *,
    value: jax.Array,
    grads: list[jax.Array],
    params: list[jax.Array],
    on_nan: OnNan,
) -> TrainState:
    """Returns the new state, or the old one if this step had a NaN or Inf.

    Args:
        old: The state before the step.
        new: The state after it.
        value: The step's loss.
        grads: Whether each gradient leaf is finite.
        params: Whether each leaf of the new parameters is finite; an optimizer may produce
            NaN or Inf from finite gradients.
        on_nan: As in `step.make_train_step`; "count" checks only the loss and the gradients.
    """
    if on_nan == "ignore":
        return new
    if on_nan == "count":
        is_bad = ~jnp.isfinite(value) | ~jnp.all(jnp.stack(grads))
        return new.replace(health=new.health._replace(n_bad=old.health.n_bad + is_bad))
    are_bad = ~jnp.stack([*grads, *params])
    is_bad = ~jnp.isfinite(value) | jnp.any(are_bad)
    was_bad = old.health.first_step > 0
    is_first = is_bad & ~was_bad
    leaf = jnp.where(jnp.any(are_bad), jnp.argmax(are_bad), -1).astype(jnp.int32)
    first = Health(old.health.n_bad + 1, old.step + 1, value.astype(jnp.float32), leaf)
    health = jax.tree.map(lambda a, b: jnp.where(is_first, b, a), old.health, first)
    health = health._replace(n_bad=old.health.n_bad + is_bad)
    selected = select((is_bad | was_bad) if on_nan == "stop" else is_bad, old, new)
    step = selected.step if on_nan == "stop" else new.step
    return selected.replace(step=step, health=health)


def all_finite_since(n_bad: jax.Array, state: TrainState, on_nan: OnNan) -> jax.Array:
    """Returns whether steps run with "count" had the same result as guarded steps.

    The parameters are checked once, after the last step: a NaN or Inf stays one.

    Args:
        n_bad: The count before the steps.
        state: The state after them.
        on_nan: The option of the guarded steps; with "stop" they do nothing after a bad step.
    """
    was_finite = n_bad == 0 if on_nan == "stop" else True
    are_finite = jnp.all(jnp.stack(trees.are_finite(state.params)))
    return was_finite & (state.health.n_bad == n_bad) & are_finite


def select(is_old: jax.Array, old: Tree, new: Tree) -> Tree:
    """Returns one of two trees; arrays that are the same in both are not copied."""
    leaves, treedef = jax.tree.flatten(new)
    pairs = list(zip(jax.tree.leaves(old), leaves, strict=True))
    changed = [i for i, (a, b) in enumerate(pairs) if a is not b]
    # On CPU a branch copies the new state; a select would also read the old one.
    # Other devices would wait for the host to decide a branch.
    selected = jax.lax.platform_dependent(
        is_old,
        [pairs[i] for i in changed],
        cpu=lambda is_old, pairs: jax.lax.cond(
            is_old, lambda: [a for a, _ in pairs], lambda: [b for _, b in pairs]
        ),
        default=lambda is_old, pairs: [jnp.where(is_old, a, b) for a, b in pairs],
    )
    for i, leaf in zip(changed, selected, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def diagnosis(state: TrainState) -> str:
    """Describes where the first NaN or Inf appeared; empty if there was none."""
    health = jax.device_get(state.health)
    if not health.n_bad:
        return ""
    causes = []
    if not math.isfinite(health.first_loss):
        causes.append(f"the loss was {float(health.first_loss)}")
    if health.first_leaf >= 0:
        names = ["/".join(name) for name in trees.leaf_names(state.params)]
        is_update, i = divmod(int(health.first_leaf), len(names))
        kind = "update" if is_update else "gradient"
        causes.append(f"the {kind} of {names[i]!r} was the first with NaN or Inf")
    return f"At step {int(health.first_step)} {' and '.join(causes)}."
