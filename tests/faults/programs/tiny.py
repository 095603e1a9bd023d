"""A model file that trains in no time; settings make it slow to evaluate, or bad."""

import time

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator.module import Experiment

DEFAULTS = {
    "train_pattern": "train",
    "train_batch_size": 10,
    "train_shuffle_buf": 100,
    "max_train_steps": 60,
    "check_every_steps": 5,
    "max_ckpt": 100,
    "random_seed": 4,
    "steps_per_dispatch": "1",
    "progress": False,
    "check_ckpt_every_secs": 1,
}


def get_config():
    return ml_collections.ConfigDict({"poison": -1, "step_seconds": 0.0, "eval_seconds": 0.0})


def open_data(config, pattern, train):
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int32)
    if train and config.poison >= 0:
        x[config.poison] = np.nan
    seconds = (config.step_seconds if train else config.eval_seconds) / 10
    return data_lib.as_source({"x": x, "y": y}).map(lambda example: slow(example, seconds))


def slow(example, seconds):
    time.sleep(seconds)
    return example


class Model(nn.Module):
    """One layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def experiment(config, data):
    return Experiment(
        model=Model(),
        loss=loss,
        optimizer=optax.adam(1e-2),
        inputs=lambda batch: batch["x"],
        metrics={"accuracy": lambda logits, batch: jnp.argmax(logits, -1) == batch["y"]},
    )


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
