"""A model file with a rate and data of its own, to train, forge and replay."""

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator import Experiment

DEFAULTS = {
    "train_pattern": "rows",
    "train_batch_size": 8,
    "train_shuffle_buf": 100,
    "random_seed": 3,
    "progress": False,
    "max_train_steps": 40,
    "check_every_steps": 10,
}


def get_config():
    return ml_collections.ConfigDict({"rate": 1e-2, "n_bad_rows": 0})


def open_data(config, pattern, train):
    x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int32)
    if config.n_bad_rows:
        y[: config.n_bad_rows] = 1
    return data_lib.as_source({"x": x, "y": y})


class Model(nn.Module):
    """One hidden layer with dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(8)(x)))
        return nn.Dense(2)(x)


def experiment(config, data):
    return Experiment(
        model=Model(),
        loss=lambda logits, batch: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        ),
        optimizer=optax.adam(config.rate),
        inputs=lambda batch: batch["x"],
    )
