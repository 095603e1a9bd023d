"""A classifier of images in Flax NNX. Make it yours: the model, the loss, the data.

    tekoa train my_model.py       trains on the embedded handwritten digits
    tekoa eval my_model.py        evaluates the newest checkpoint
    tekoa predict my_model.py     prints one class per image
    tekoa page runs/my_model      draws the curves

Other data: --train_pattern=idx://DIR/split=train --valid_pattern=idx://DIR/split=test
Other settings: --module_config.width=64
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import nnx

from tekoa.estimator import DataFacts, Experiment

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
    return ml_collections.ConfigDict({"width": 32})


class Classifier(nnx.Module):
    """A convolution and two dense layers."""

    def __init__(self, shape: tuple[int, ...], width: int, n_classes: int, rngs: nnx.Rngs):
        height, n_columns, n_channels = shape
        self.conv = nnx.Conv(n_channels, width, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(height * n_columns * width, 4 * width, rngs=rngs)
        self.out = nnx.Linear(4 * width, n_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (rows, classes)."""
        x = nnx.relu(self.conv(x))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(x)


def experiment(config: Any, data: DataFacts) -> Experiment:
    """Returns the model with its loss, optimizer and metrics."""
    shape, n_classes = data.info.shapes["image"], data.info.n_classes or 10
    _, brightest = data.info.value_range or (0, 255)
    return Experiment(
        model=Classifier(shape, config.width, n_classes, nnx.Rngs(0)),
        inputs=lambda batch: batch["image"].astype(jnp.float32) / brightest,
        loss=loss,
        optimizer="auto",  # Or any optax optimizer, such as optax.adamw(1e-3).
        metrics={"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
        predict=lambda logits: logits.argmax(-1),
    )


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
