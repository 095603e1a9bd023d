"""Metrics that can be selected by name.

Each is `metric(outputs, targets)` and returns totals that add up over batches, so the result is
exact for batches of different sizes and on several devices or hosts. Outputs are logits: one per
class on the last axis for class numbers, or one per target for yes-or-no targets.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import messages
from tekoa.core.metrics import Mean, Totals
from tekoa.fitting import loss_names
from tekoa.fitting.loss_names import class_labels, of_two_arrays, same_shape

Metric = Callable[..., Any]
Mode = Literal["min", "max"]

# Scores are sorted into this many bins between 0 and 1, which bounds the error of "auc".
N_AUC_BINS = 4096


@of_two_arrays
def accuracy(outputs: jax.Array, targets: jax.Array) -> Mean:
    """Returns the fraction of correct predictions."""
    return top(outputs, targets, 1) if _has_classes(outputs, targets) else _yes_no(outputs, targets)


@of_two_arrays
def top5(logits: jax.Array, labels: jax.Array) -> Mean:
    """Returns the fraction of rows whose class is among the five largest logits."""
    return top(logits, labels, 5)


def top(logits: jax.Array, labels: jax.Array, k: int) -> Mean:
    """Returns the fraction of rows with fewer than `k` logits above that of their class."""
    labels, is_counted = class_labels(logits, labels)
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    # Of equal logits the first counts as the largest, as in argmax.
    is_before = jnp.arange(logits.shape[-1]) < labels[..., None]
    n_above = jnp.sum((logits > right) | ((logits == right) & is_before), axis=-1)
    # A NaN is neither above nor below: it is never correct.
    is_correct = (n_above < k) & jnp.isfinite(right[..., 0])
    return Mean(jnp.sum(is_correct * is_counted), jnp.sum(is_counted))


def _yes_no(logits: jax.Array, targets: jax.Array) -> Mean:
    logits, targets = same_shape("accuracy", logits, targets)
    is_correct = (logits > 0) == (targets > 0.5)
    return Mean(jnp.sum(is_correct.astype(jnp.float32)), jnp.float32(targets.size))


@of_two_arrays
def precision(outputs: jax.Array, targets: jax.Array) -> Totals:
    """Returns true positives / predicted positives; the mean over the classes if there are any."""
    return Totals(_confusion(outputs, targets), _precision)


@of_two_arrays
def recall(outputs: jax.Array, targets: jax.Array) -> Totals:
    """Returns true positives / positives; the mean over the classes if there are any."""
    return Totals(_confusion(outputs, targets), _recall)


@of_two_arrays
def f1(outputs: jax.Array, targets: jax.Array) -> Totals:
    """Returns the harmonic mean of precision and recall; macro average over the classes."""
    return Totals(_confusion(outputs, targets), _f1)


@of_two_arrays
def auc(logits: jax.Array, targets: jax.Array) -> Totals:
    """Returns the area under the ROC curve for yes-or-no targets; two logits are those of no, yes.

    Scores are counted in 4096 bins of the sigmoid, so that the counts add up over batches.
    """
    if logits.shape == (*targets.shape, 2):
        logits = logits[..., 1] - logits[..., 0]
    logits, targets = same_shape("auc", logits, targets)
    bins = jnp.clip(jax.nn.sigmoid(logits) * N_AUC_BINS, 0, N_AUC_BINS - 1).astype(jnp.int32)
    is_positive = (targets > 0.5).astype(jnp.float32)
    empty = jnp.zeros(N_AUC_BINS, jnp.float32)
    totals = {
        "positives": empty.at[bins.ravel()].add(is_positive.ravel()),
        "negatives": empty.at[bins.ravel()].add(1 - is_positive.ravel()),
    }
    return Totals(totals, _area)


@of_two_arrays
def perplexity(logits: jax.Array, labels: jax.Array) -> Totals:
    """Returns the exponential of the cross-entropy."""
    return Totals(loss_names.cross_entropy(logits, labels)._asdict(), _exp_mean)


@of_two_arrays
def rmse(outputs: jax.Array, targets: jax.Array) -> Totals:
    """Returns the root of the mean squared error."""
    return Totals(loss_names.mse(outputs, targets)._asdict(), _root_mean)


@of_two_arrays
def r2(outputs: jax.Array, targets: jax.Array) -> Totals:
    """Returns the coefficient of determination over all targets together."""
    outputs, targets = same_shape("r2", outputs, targets)
    totals = {
        "errors": jnp.sum(jnp.square(outputs - targets)),
        "total": jnp.sum(targets),
        "squares": jnp.sum(jnp.square(targets)),
        "count": jnp.float32(targets.size),
    }
    return Totals(totals, _r2)


METRICS: dict[str, tuple[Metric, Mode]] = {
    "accuracy": (accuracy, "max"),
    "auc": (auc, "max"),
    "f1": (f1, "max"),
    "perplexity": (perplexity, "min"),
    "precision": (precision, "max"),
    "r2": (r2, "max"),
    "recall": (recall, "max"),
    "rmse": (rmse, "min"),
    "top5": (top5, "max"),
    **{name: (loss, "min") for name, loss in loss_names.LOSSES.items()},
}


# Names in other libraries, in lower case and without punctuation.
_ELSEWHERE = {
    **loss_names.ELSEWHERE,
    **dict.fromkeys(
        ("acc", "categoricalaccuracy", "sparsecategoricalaccuracy", "binaryaccuracy", "top1"),
        "accuracy",
    ),
    **dict.fromkeys(("f1score", "macrof1"), "f1"),
    **dict.fromkeys(("rocauc", "auroc", "rocaucscore"), "auc"),
    **dict.fromkeys(("topkcategoricalaccuracy", "top5accuracy"), "top5"),
    "rootmeansquarederror": "rmse",
    "r2score": "r2",
    "ppl": "perplexity",
}
# Metrics of class numbers, which can be read off probabilities too.
_OF_CLASSES = (accuracy, top5, precision, recall, f1)


def find_metrics(
    metrics: Sequence[str] | Mapping[str, Metric] | str, loss: Any = None
) -> dict[str, Metric]:
    """Returns metric functions by name.

    Args:
        metrics: One name, several names, or functions by name.
        loss: The loss of training. With the cross-entropy, targets of the shape of the outputs
            are probabilities of classes, such as one-hot rows; otherwise each is a yes or no.

    Raises:
        ValueError: If there is no metric of a name.
        TypeError: If a metric is not a function.
    """
    if isinstance(metrics, Mapping):
        functions = {name: _find_metric(name, metric) for name, metric in metrics.items()}
    else:
        names = [metrics] if isinstance(metrics, str) else metrics
        functions = {name: _find_metric(name, name) for name in names}
    if not loss_names.is_cross_entropy(loss):
        return functions
    return {
        name: _of_probabilities(metric) if metric in _OF_CLASSES else metric
        for name, metric in functions.items()
    }


def _of_probabilities(metric: Metric) -> Metric:
    """Returns a metric of class numbers that accepts one probability for each class too."""

    @functools.wraps(metric)
    def call(outputs: jax.Array, targets: jax.Array) -> Any:
        if targets.shape == outputs.shape and outputs.shape[-1:] not in ((), (1,)):
            targets = jnp.argmax(targets, axis=-1)
        return metric(outputs, targets)

    return call


def _find_metric(name: str, metric: Any) -> Metric:
    if callable(metric):
        return metric
    if not isinstance(metric, str):
        raise TypeError(f"Metric {name!r} must be a name or a function, got {metric!r}.")
    if metric not in METRICS:
        raise ValueError(
            f"There is no metric {metric!r}."
            f"{messages.did_you_mean(metric, METRICS, elsewhere=_ELSEWHERE)} Use "
            f"{', '.join(METRICS)}, or a dict of functions metric(outputs, targets)."
        )
    return METRICS[metric][0]


def best_mode(name: str) -> Mode:
    """Returns whether a lower or a higher value of a metric is better.

    Args:
        name: The metric, such as "loss", or with the name of its data set, "clean/loss".

    Raises:
        ValueError: If the metric is not one of those with a name.
    """
    metric = name.rpartition("/")[2]
    if metric == "loss":
        return "min"
    if metric not in METRICS:
        raise ValueError(
            f"Whether a higher or a lower {name!r} is better is unknown. Pass best=({name!r}, "
            f"'max') or best=({name!r}, 'min')."
        )
    return METRICS[metric][1]


def _has_classes(outputs: jax.Array, targets: jax.Array) -> bool:
    """Whether the targets are class numbers and the outputs one logit per class."""
    is_integer = jnp.issubdtype(targets.dtype, jnp.integer)
    has_last_axis = outputs.shape[-1:] not in ((), (1,))
    return is_integer and has_last_axis and outputs.shape != targets.shape


def _confusion(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Returns the numbers of hits, predictions and occurrences, per class if there are any."""
    if not _has_classes(outputs, targets):
        logits, targets = same_shape("precision, recall and f1", outputs, targets)
        predicted, actual = (logits > 0)[..., None], (targets > 0.5)[..., None]
    else:
        labels, is_counted = class_labels(outputs, targets)
        classes, is_counted = jnp.arange(outputs.shape[-1]), is_counted[..., None] > 0
        predicted = (jnp.argmax(outputs, -1)[..., None] == classes) & is_counted
        actual = (labels[..., None] == classes) & is_counted
    axes = tuple(range(actual.ndim - 1))
    parts = {"hits": predicted & actual, "predicted": predicted, "actual": actual}
    return {name: jnp.sum(x.astype(jnp.float32), axes) for name, x in parts.items()}


def _precision(hits: Any, predicted: Any, actual: Any) -> float:
    return _macro(hits, predicted, predicted + actual)


def _recall(hits: Any, predicted: Any, actual: Any) -> float:
    return _macro(hits, actual, predicted + actual)


def _f1(hits: Any, predicted: Any, actual: Any) -> float:
    return _macro(2 * hits, predicted + actual, predicted + actual)


def _macro(numerator: Any, denominator: Any, n_seen: Any) -> float:
    """Averages over the classes that occur; 0 / 0 counts as 0."""
    ratio = np.divide(numerator, denominator, out=np.zeros(len(n_seen)), where=denominator > 0)
    return float(ratio[n_seen > 0].mean()) if (n_seen > 0).any() else float("nan")


def _area(positives: Any, negatives: Any) -> float:
    if not positives.sum() or not negatives.sum():
        return float("nan")
    below = np.cumsum(negatives, dtype=np.float64) - negatives
    wins = np.sum(positives * (below + negatives / 2), dtype=np.float64)
    return float(wins / positives.sum(dtype=np.float64) / negatives.sum(dtype=np.float64))


def _exp_mean(total: Any, count: Any) -> float:
    return float(np.exp(total / count))


def _root_mean(total: Any, count: Any) -> float:
    return float(np.sqrt(total / count))


def _r2(errors: Any, total: Any, squares: Any, count: Any) -> float:
    spread = squares - total**2 / count
    return float(1 - errors / spread) if spread > 0 else float("nan")
