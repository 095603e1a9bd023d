"""A model file with numbers to sweep, one that changes shapes, and one that makes the loss NaN."""

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator import Experiment

DEFAULTS = {
    "train_batch_size": 4,
    "train_pattern": "train",
    "max_train_steps": 16,
    "check_every_steps": 2,
    "train_shuffle_buf": 40,
}


def get_config():
    return ml_collections.ConfigDict({"rate": 0.01, "width": 3, "limit": 0.0})


def open_data(config, pattern, train):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    return data_lib.as_source({"x": x, "y": x.sum(axis=1, keepdims=True)})


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.width)(x)))


def experiment(config, data):
    def loss(out, batch):
        value = jnp.mean((out - batch["y"]) ** 2)
        return value / (value > config.limit)

    return Experiment(
        model=Net(config.width),
        loss=loss,
        optimizer=optax.adam(config.rate),
        inputs=lambda batch: batch["x"],
    )
