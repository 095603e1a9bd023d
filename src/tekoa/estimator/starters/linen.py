"""A classifier of images in Flax Linen. Make it yours: the model, the loss, the data.

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
from flax import linen as nn

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


class Classifier(nn.Module):
    """A convolution and two dense layers."""

    width: int
    n_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (rows, classes)."""
        x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(len(x), -1)))
        return nn.Dense(self.n_classes)(x)


def experiment(config: Any, data: DataFacts) -> Experiment:
    """Returns the model with its loss, optimizer and metrics."""
    _, brightest = data.info.value_range or (0, 255)
    return Experiment(
        model=Classifier(config.width, data.info.n_classes or 10),
        inputs=lambda batch: batch["image"].astype(jnp.float32) / brightest,
        loss=loss,
        optimizer="auto",  # Or any optax optimizer, such as optax.adamw(1e-3).
        metrics={"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
        predict=lambda logits: logits.argmax(-1),
    )


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
