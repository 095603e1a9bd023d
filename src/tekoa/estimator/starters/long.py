"""A classifier of images in the long form: with a training step of its own. Make it yours.

    tekoa train my_model.py       trains on the embedded handwritten digits
    tekoa eval my_model.py        evaluates the newest checkpoint
    tekoa predict my_model.py     prints one class per image

Use it for steps that a loss cannot express; `tekoa new --library=linen` writes the short form.
"""

import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn

from tekoa import data
from tekoa.estimator import Evaluator, InferState, MeanMetrics, Predictor, TrainState

# Flags of the command that you need not type; those of DEFAULTS only if no data is named.
ALWAYS = {"train_batch_size": 32, "train_shuffle_buf": 4096, "check_every_steps": 45}
DEFAULTS = {
    **ALWAYS,
    "train_epochs": 10,
    "train_pattern": "digits://split=train",
    "valid_pattern": "digits://split=test",
    "eval_pattern": "digits://split=test",
    "pred_pattern": "digits://split=test",
}


def get_config() -> ml_collections.ConfigDict:
    """Returns the settings that `--module_config.NAME=VALUE` changes."""
    return ml_collections.ConfigDict({"width": 32, "n_classes": 10, "size": 8, "rate": 0.002})


def load_config(flags: types.SimpleNamespace) -> ml_collections.ConfigDict:
    """Returns the settings of this run, with the functions that open its data."""
    config: Any = ml_collections.ConfigDict(flags.module_config)
    # The config passed to steps must be hashable: the numbers, without the functions.
    config.frozen = ml_collections.FrozenConfigDict(config)
    config.train_data_fn = data.DataFn(data.load)
    config.valid_data_fn = data.DataFn(data.load)
    config.eval_data_fn = data.DataFn(data.load, lambda e: (e["label"], {"image": e["image"]}))
    config.pred_data_fn = data.DataFn(data.load, lambda e: {"image": e["image"]})
    return config


class Classifier(nn.Module):
    """A convolution and two dense layers."""

    width: int
    n_classes: int

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Returns logits of shape (rows, classes)."""
        x = nn.relu(nn.Conv(self.width, (3, 3))(image.astype(jnp.float32) / 16))
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(len(x), -1)))
        return nn.Dense(self.n_classes)(x)

    def loss(self, image: jax.Array, label: jax.Array) -> jax.Array:
        """Returns the mean cross entropy of a batch."""
        return optax.softmax_cross_entropy_with_integer_labels(self(image), label).mean()


def make_model(config: Any) -> tuple[Classifier, jax.Array]:
    """Returns the model, and an input that shows its shapes."""
    return Classifier(config.width, config.n_classes), jnp.zeros((1, config.size, config.size, 1))


def get_train_state(config: Any, rng: jax.Array) -> TrainState:
    """Creates model, optimizer and metrics for training."""
    metrics = MeanMetrics.create("train_loss", "valid_loss", "valid_accuracy")
    model, image = make_model(config)
    return TrainState.create(metrics, optax.adam(config.rate), model, rng, image)


def train_step(config: Any, batch: Any, state: TrainState, metrics: Any) -> tuple[TrainState, Any]:
    """Runs one training step: gradients, update, metrics."""
    del config
    loss, grads = state.value_and_grad_apply_fn()(
        state.params, batch["image"], batch["label"], method=Classifier.loss
    )
    metrics = add_mean(state, metrics, "train_loss", loss, len(batch["label"]))
    return state.apply_gradients(grads=grads), metrics


def valid_step(config: Any, batch: Any, state: TrainState, metrics: Any) -> Any:
    """Adds one validation batch to the metrics."""
    del config
    image, label = batch["image"], batch["label"]
    loss = state.apply_fn(state.variables(), image, label, method=Classifier.loss)
    metrics = add_mean(state, metrics, "valid_loss", loss, len(label))
    accuracy = (state.apply_fn(state.variables(), image).argmax(-1) == label).mean()
    return add_mean(state, metrics, "valid_accuracy", accuracy, len(label))


def add_mean(state: TrainState, metrics: Any, name: str, mean: jax.Array, n_rows: int) -> Any:
    """Returns the metrics with the mean of one batch added."""
    _, metrics = state.metrics_mod.apply(
        metrics, name, mean * n_rows, n_rows, method=MeanMetrics.update, mutable=["metrics"]
    )
    return metrics


def get_infer_state(config: Any) -> InferState:
    """Creates the model for evaluation and prediction."""
    return InferState.create(*make_model(config))


def infer_step(config: Any, batch: Any, state: InferState) -> InferState:
    """Computes the class of every row of a batch."""
    del config
    logits = state.apply_fn(state.variables(), batch["image"])
    return state.replace(ret=logits.argmax(-1))


def get_evaluator(config: Any) -> Evaluator:
    """Returns the evaluator, which scores all results."""
    del config

    def accuracy(labels: Sequence[int], classes: Sequence[int]) -> float:
        return sum(a == b for a, b in zip(labels, classes, strict=True)) / len(labels)

    return Evaluator({"accuracy": (list, accuracy)})


def get_predictor(config: Any) -> Predictor:
    """Returns the predictor, which writes one class per line."""
    del config
    return Predictor(lambda classes: [str(c) for c in classes])
