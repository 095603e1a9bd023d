"""Losses that can be selected by name.

Each is `loss(outputs, targets) -> Mean`: the mean over all rows and positions, and exact over
microbatches and uneven batches because totals and counts are summed separately.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core import batch as batches
from tekoa.core import messages
from tekoa.core.loss import cross_entropy as cross_entropies
from tekoa.core.metrics import Mean

Loss = Callable[..., Any]

# Names in other libraries, in lower case and without punctuation.
_ELSEWHERE = {
    "cross_entropy": (
        "crossentropyloss categoricalcrossentropy sparsecategoricalcrossentropy nll nllloss "
        "softmaxcrossentropy negativeloglikelihood"
    ),
    "bce": "binarycrossentropy bceloss bcewithlogits bcewithlogitsloss logloss",
    "mse": "meansquarederror mseloss l2 l2loss squarederror",
    "mae": "meanabsoluteerror l1 l1loss maeloss",
    "huber": "smoothl1 smoothl1loss huberloss",
}
ELSEWHERE = {other: name for name, others in _ELSEWHERE.items() for other in others.split()}


def of_two_arrays(function: Loss) -> Loss:
    """Checks that a loss or metric receives one array of outputs and one of targets."""

    @functools.wraps(function)
    def call(*arrays: Any, **options: float) -> Any:
        if len(arrays) == 1 and hasattr(arrays[0], "dtype"):
            raise TypeError(
                f"{function.__name__!r} compares outputs with targets, but the data has no "
                "targets. Pass both, as (x, y), or name the targets: targets=."
            )
        if len(arrays) != 2 or not all(hasattr(array, "dtype") for array in arrays):
            shapes = ", ".join(str(batches.shapes_to_json(array)) for array in arrays)
            raise TypeError(
                f"{function.__name__!r} needs one array of outputs and one of targets, but the "
                f"outputs of the model, followed by the targets, are: {shapes}. Pass a function "
                "that accepts all of these instead of the name."
            )
        if arrays[1].ndim == 0:
            raise ValueError(
                f"The targets are a single number, {arrays[1].dtype}: the data yields examples "
                "instead of batches. Yield batches, or pass arrays or a list of the examples."
            )
        return function(*arrays, **options)

    return call


@of_two_arrays
def cross_entropy(logits: jax.Array, labels: jax.Array, **options: float) -> Mean:
    """Returns the cross-entropy of logits.

    Args:
        logits: Scores of shape (..., classes).
        labels: Class numbers of shape (...), where negative numbers are ignored; or probabilities
            of the shape of the logits, such as one-hot rows.
        **options: As for `tekoa.cross_entropy`.
    """
    is_one_hot = labels.shape == logits.shape != (*logits.shape[:-1], 1)
    if jnp.issubdtype(labels.dtype, jnp.integer) and not is_one_hot:
        labels, is_counted = class_labels(logits, labels)
        values = cross_entropies.cross_entropy(logits, labels, **options)
        return Mean(jnp.sum(values * is_counted), jnp.sum(is_counted))
    if labels.shape != logits.shape:
        raise ValueError(
            f"'cross_entropy' needs class numbers, which are integers, or one probability for each "
            f"class; got targets {labels.dtype} of shape {labels.shape} for outputs of shape "
            f"{logits.shape}. Use y.astype(int) for class numbers, and 'mse' for quantities."
        )
    labels = labels.astype(jnp.float32)
    return _mean(cross_entropies.cross_entropy(logits, labels, **options))


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


@of_two_arrays
def bce(logits: jax.Array, targets: jax.Array) -> Mean:
    """Returns the binary cross-entropy of logits with targets between 0 and 1."""
    logits, targets = same_shape("bce", logits, targets)
    return _mean(optax.sigmoid_binary_cross_entropy(logits, targets))


@of_two_arrays
def mse(outputs: jax.Array, targets: jax.Array) -> Mean:
    """Returns the mean squared error."""
    outputs, targets = same_shape("mse", outputs, targets)
    return _mean(jnp.square(outputs - targets))


@of_two_arrays
def mae(outputs: jax.Array, targets: jax.Array) -> Mean:
    """Returns the mean absolute error."""
    outputs, targets = same_shape("mae", outputs, targets)
    return _mean(jnp.abs(outputs - targets))


@of_two_arrays
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


def find_loss(
    loss: str | Loss | None, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Loss | None:
    """Returns the loss of a name; a function or None is returned unchanged.

    Args:
        loss: The name, or a function.
        label_smoothing: As for `tekoa.cross_entropy`, whose plain value is reported.
        z_loss: As for `tekoa.cross_entropy`.

    Raises:
        ValueError: If there is no loss of that name, or the options are not for it.
        TypeError: If it is neither a name nor a function.
    """
    if label_smoothing or z_loss:
        if loss != "cross_entropy":
            raise ValueError(
                'label_smoothing= and z_loss= are options of loss="cross_entropy". In a loss of '
                "one's own, use tekoa.cross_entropy."
            )
        return _regularized(label_smoothing, z_loss)
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(
                f"There is no loss {loss!r}."
                f"{messages.did_you_mean(loss, LOSSES, elsewhere=ELSEWHERE)} Use one of "
                f"{', '.join(LOSSES)}, or a function loss(outputs, targets)."
            )
        return LOSSES[loss]
    if loss is None or callable(loss):
        return loss
    raise TypeError(f"loss must be a name or a function, got {type(loss).__name__}.")


def _regularized(label_smoothing: float, z_loss: float) -> Loss:
    cross_entropies.check_options(label_smoothing, z_loss)

    @functools.wraps(cross_entropy)
    def regularized(logits: jax.Array, labels: jax.Array) -> tuple[Mean, dict[str, Mean]]:
        options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        return cross_entropy(logits, labels, **options), {"loss": cross_entropy(logits, labels)}

    return regularized


def is_cross_entropy(loss: Any) -> bool:
    """Whether a loss is "cross_entropy", with or without options."""
    return loss is cross_entropy or getattr(loss, "__wrapped__", None) is cross_entropy


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
