"""Losses that can be selected by name.

Each is `loss(outputs, targets) -> Mean`: the mean over all rows and positions, and exact over
microbatches and uneven batches because totals and counts are summed separately.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core import messages
from tekoa.core.metrics import Mean

Loss = Callable[..., Any]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> Mean:
    """Returns the cross-entropy of logits.

    Args:
        logits: Scores of shape (..., classes).
        labels: Class numbers of shape (...), where negative numbers are ignored; or probabilities
            of the shape of the logits.
    """
    logits = logits.astype(jnp.float32)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        labels, is_counted = class_labels(logits, labels)
        values = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return Mean(jnp.sum(values * is_counted), jnp.sum(is_counted))
    _check_same_shape("cross_entropy", logits, labels)
    return _mean(optax.softmax_cross_entropy(logits, labels))


def class_labels(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns class numbers without negative ones, and 1 where they were not negative, else 0.

    Raises:
        ValueError: If the shapes do not belong together.
    """
    if labels.shape == (*logits.shape[:-1], 1):  # A column of a table.
        labels = labels[..., 0]
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"Class numbers must have the shape of the outputs without the last axis, which is "
            f"{logits.shape[:-1]}, but the targets have shape {labels.shape}."
        )
    return jnp.maximum(labels, 0), (labels >= 0).astype(jnp.float32)


def bce(logits: jax.Array, targets: jax.Array) -> Mean:
    """Returns the binary cross-entropy of logits with targets between 0 and 1."""
    logits, targets = same_shape("bce", logits, targets)
    return _mean(optax.sigmoid_binary_cross_entropy(logits, targets))


def mse(outputs: jax.Array, targets: jax.Array) -> Mean:
    """Returns the mean squared error."""
    outputs, targets = same_shape("mse", outputs, targets)
    return _mean(jnp.square(outputs - targets))


def mae(outputs: jax.Array, targets: jax.Array) -> Mean:
    """Returns the mean absolute error."""
    outputs, targets = same_shape("mae", outputs, targets)
    return _mean(jnp.abs(outputs - targets))


def huber(outputs: jax.Array, targets: jax.Array) -> Mean:
    """Returns the Huber loss with a threshold of 1."""
    outputs, targets = same_shape("huber", outputs, targets)
    return _mean(optax.huber_loss(outputs, targets))


LOSSES: dict[str, Callable[..., Mean]] = {
    "bce": bce,
    "cross_entropy": cross_entropy,
    "huber": huber,
    "mae": mae,
    "mse": mse,
}


def find_loss(loss: str | Loss | None) -> Loss | None:
    """Returns the loss of a name; a function or None is returned unchanged.

    Raises:
        ValueError: If there is no loss of that name.
        TypeError: If it is neither a name nor a function.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(
                f"There is no loss {loss!r}.{messages.did_you_mean(loss, LOSSES)} Use one of "
                f"{', '.join(LOSSES)}, or a function loss(outputs, targets)."
            )
        return LOSSES[loss]
    if loss is None or callable(loss):
        return loss
    raise TypeError(f"loss must be a name or a function, got {type(loss).__name__}.")


def same_shape(what: str, outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both as float32 of one shape; a last axis of length 1 is dropped if need be.

    Outputs of shape (n, 1) and targets of shape (n,) would otherwise broadcast to (n, n).

    Raises:
        ValueError: If the shapes differ.
    """
    outputs, targets = outputs.astype(jnp.float32), targets.astype(jnp.float32)
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs[..., 0]
    elif targets.shape == (*outputs.shape, 1):
        targets = targets[..., 0]
    _check_same_shape(what, outputs, targets)
    return outputs, targets


def _check_same_shape(what: str, outputs: jax.Array, targets: jax.Array) -> None:
    if outputs.shape != targets.shape:
        raise ValueError(
            f"{what!r} needs outputs and targets of the same shape, got {outputs.shape} and "
            f"{targets.shape}."
        )


def _mean(values: jax.Array) -> Mean:
    return Mean(jnp.sum(values), jnp.float32(values.size))
