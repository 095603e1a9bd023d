"""What happens when a loss or a gradient is not finite.

The host runs ahead of the device, so the decision is taken on the device: a bad step
leaves the state as it was, and the record of it travels with the state.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.core.state import Health, TrainState

OnNan = Literal["stop", "skip", "count", "ignore"]


class NonFiniteError(FloatingPointError):
    """Training stopped at numbers that are not finite; the state is the last good one."""


def guarded(
    old: TrainState,
    new: TrainState,
    *,
    value: jax.Array,
    grads: list[jax.Array],
    params: list[jax.Array],
    on_nan: OnNan,
) -> TrainState:
    """Gives the new state, or the old one where this step went bad.

    Args:
        old: The state before the step.
        new: The state after it.
        value: The step's loss.
        grads: Whether each gradient leaf is finite.
        params: The same of the new parameters, which an optimizer may spoil though the
            gradients are fine.
        on_nan: "stop" keeps the old state, now and ever after; "skip" goes on with the next
            step; "count" gives the new state and counts a bad loss or gradient; "ignore" gives
            the new state.
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
    kept = _either((is_bad | was_bad) if on_nan == "stop" else is_bad, old, new)
    step = kept.step if on_nan == "stop" else new.step
    return kept.replace(step=step, health=health)


def is_fine(n_bad: jax.Array, state: TrainState, on_nan: OnNan) -> jax.Array:
    """Tells whether steps that only counted have done what guarded ones would have.

    Parameters are looked at once: what is not finite stays so, whatever is added.

    Args:
        n_bad: The count before them.
        state: The state after them.
        on_nan: What the guarded steps would do; "stop" stays where something bad came before.
    """
    was_fine = n_bad == 0 if on_nan == "stop" else True
    are_finite = jnp.all(jnp.stack(trees.are_finite(state.params)))
    return was_fine & (state.health.n_bad == n_bad) & are_finite


def _either(is_old: jax.Array, old: TrainState, new: TrainState) -> TrainState:
    """Gives one of two states; what is the same array in both is left alone."""
    leaves, treedef = jax.tree.flatten(new)
    pairs = list(zip(jax.tree.leaves(old), leaves, strict=True))
    changed = [i for i, (a, b) in enumerate(pairs) if a is not b]
    # On CPU a branch costs a copy of the new state, a select also reads the old one.
    # Other devices would wait for the host to take the branch.
    chosen = jax.lax.platform_dependent(
        is_old,
        [pairs[i] for i in changed],
        cpu=lambda is_old, pairs: jax.lax.cond(
            is_old, lambda: [a for a, _ in pairs], lambda: [b for _, b in pairs]
        ),
        default=lambda is_old, pairs: [jnp.where(is_old, a, b) for a, b in pairs],
    )
    for i, leaf in zip(changed, chosen, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def diagnosis(state: TrainState) -> str:
    """Tells where the first value that was not finite appeared; empty if all is well."""
    health = jax.device_get(state.health)
    if not health.n_bad:
        return ""
    names = ["/".join(name) for name in trees.leaf_names(state.params)]
    places = []
    if not math.isfinite(health.first_loss):
        places.append(f"the loss was {float(health.first_loss)}")
    if 0 <= health.first_leaf < len(names):
        name = names[health.first_leaf]
        places.append(f"the gradient of {name!r} was the first that was not finite")
    elif health.first_leaf >= 0:
        name = names[health.first_leaf - len(names)]
        places.append(f"the update of {name!r} was the first that was not finite")
    return f"At step {int(health.first_step)} {' and '.join(places)}."
