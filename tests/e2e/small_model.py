"""A model file that trains in no time, on data that comes slowly: a second to kill it in."""

import time

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator.module import Experiment

ALWAYS = {
    "train_pattern": "train",
    "train_batch_size": 8,
    "train_shuffle_buf": 100,
    "eval_batch_size": 30,
    "steps_per_dispatch": "1",
    "progress": False,
}
DEFAULTS = ALWAYS


def get_config():
    return ml_collections.ConfigDict({"seconds_per_example": 0.0})


def open_data(config, pattern, train):
    rng = np.random.default_rng(0 if train else 1)
    x = rng.normal(size=(200 if train else 100, 4)).astype(np.float32)

    def slowly(example):
        time.sleep(config.seconds_per_example)
        return example

    return data_lib.as_source({"x": x, "y": (x.sum(1) > 0).astype(np.int32)}).map(slowly)


class Model(nn.Module):
    """Two layers with dropout: a resumed run must draw the same numbers."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.5)(nn.relu(nn.Dense(8)(x)), deterministic=not train)
        return nn.Dense(2)(x)


def experiment(config, data):
    return Experiment(
        model=Model(),
        loss=loss,
        optimizer=optax.adam(3e-3),
        inputs=lambda batch: batch["x"],
        metrics={
            "accuracy": lambda logits, batch: jnp.argmax(logits, -1) == batch["y"],
            "cost": loss,
        },
    )


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
