"""What happens to gradients before the optimizer gets them."""

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.core.trees import PyTree

_NOISE = 0x6E6F6973


def shape_gradients(
    grads: PyTree, rng: jax.Array, *, clip_norm: float | None = None, noise: float | None = None
) -> PyTree:
    """Returns the gradients as an optimizer gets them: clipped, and with noise.

    Args:
        grads: The gradients of the loss.
        rng: The key of the step.
        clip_norm: If the norm of all gradients is larger, they are scaled down to it.
        noise: Standard deviation of normal noise, added after clipping.

    >>> shape_gradients({"w": jnp.float32([3.0, 4.0])}, jax.random.key(0), clip_norm=1.0)
    {'w': Array([0.6, 0.8], dtype=float32)}
    """
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(trees.global_norm(grads), 1e-30))
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    if noise is None:
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    # Not the key of the model's own randomness.
    keys = jax.random.split(jax.random.fold_in(rng, _NOISE), len(leaves))
    return treedef.unflatten(
        g + jnp.asarray(noise, g.dtype) * jax.random.normal(key, g.shape, g.dtype)
        for g, key in zip(leaves, keys, strict=True)
    )
