"""A model file that trains in milliseconds: one layer, with a running mean of its inputs."""

import os
import signal

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator import Experiment

ALWAYS = {"train_batch_size": 10, "random_seed": 4, "steps_per_dispatch": "1", "progress": False}
DEFAULTS = {**ALWAYS, "train_pattern": "train", "max_train_steps": 6, "check_every_steps": 3}


def get_config():
    return ml_collections.ConfigDict({"n_classes": 2, "can_predict": True, "stop_at_read": 0})


def open_data(config, pattern, train):
    if pattern == "stopping":
        return data_lib.as_source(_rows()).map(lambda example: _count(example, config))
    rows = _rows()
    return data_lib.as_source({**rows, "y": 1 - rows["y"]} if pattern == "flipped" else rows)


def _rows():
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}


def _count(example, config):
    """Sends SIGTERM once `stop_at_read` examples have been read."""
    config.stop_at_read -= 1
    if config.stop_at_read == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return example


class Model(nn.Module):
    """Batch normalisation and one dense layer."""

    n_classes: int

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(self.n_classes)(x)


def experiment(config, data):
    return Experiment(
        model=Model(config.n_classes),
        loss=loss,
        optimizer=optax.adam(1e-2),
        inputs=lambda batch: batch["x"],
        metrics={"accuracy": lambda logits, batch: jnp.argmax(logits, -1) == batch["y"]},
        predict=(lambda logits: jnp.argmax(logits, -1)) if config.can_predict else None,
    )


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
