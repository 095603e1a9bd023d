"""Cross-entropy of logits, with label smoothing and z-loss."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> jax.Array:
    """Returns the cross-entropy at each position, in float32.

    Args:
        logits: Scores of shape (..., classes).
        labels: Class numbers of shape (...), or probabilities of the shape of the logits.
        label_smoothing: The part of each label that is spread over all classes, in [0, 1).
        z_loss: Weight of the squared logarithm of the softmax's normalizer, which keeps logits
            small; such as 1e-4.

    Raises:
        ValueError: If an option is out of range.

    >>> logits = jnp.float32([[2.0, 0.0], [0.0, 0.0]])
    >>> cross_entropy(logits, jnp.array([0, 1])).round(3)
    Array([0.127, 0.693], dtype=float32)
    >>> cross_entropy(logits, jnp.array([0, 1]), label_smoothing=0.5).round(1)
    Array([0.6, 0.7], dtype=float32)
    """
    check_options(label_smoothing, z_loss)
    logits = logits.astype(jnp.float32)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        values = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        values = optax.softmax_cross_entropy(logits, labels)
    if not (label_smoothing or z_loss):
        return values
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    if label_smoothing:
        # Of labels that are the same for all classes.
        uniform = normalizer - jnp.mean(logits, axis=-1)
        values = (1 - label_smoothing) * values + label_smoothing * uniform
    return values + z_loss * jnp.square(normalizer) if z_loss else values


def check_options(label_smoothing: float, z_loss: float) -> None:
    """Raises `ValueError` if an option of `cross_entropy` is out of range."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}.")
    if not z_loss >= 0:
        raise ValueError(f"z_loss must be 0 or more, got {z_loss}.")
