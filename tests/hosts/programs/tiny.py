"""A model file that trains in no time; a setting makes its steps slow."""

import time

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator.module import Experiment

N_EXAMPLES = 60

DEFAULTS = {
    "train_pattern": "train",
    "valid_pattern": "valid",
    "eval_pattern": "eval",
    "pred_pattern": "pred",
    "train_batch_size": 12,
    "valid_batch_size": 16,
    "eval_batch_size": 16,
    "pred_batch_size": 16,
    "train_shuffle_buf": 100,
    "max_train_steps": 40,
    "check_every_steps": 5,
    "max_ckpt": 100,
    "random_seed": 4,
    "progress": False,
    "check_ckpt_every_secs": 1,
}


def get_config():
    return ml_collections.ConfigDict({"step_seconds": 0.0})


def open_data(config, pattern, train):
    x = np.random.default_rng(0).normal(size=(N_EXAMPLES, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int32)
    examples = {"x": x, "y": y, "number": np.arange(N_EXAMPLES, dtype=np.float32)}
    source = data_lib.as_source(examples)
    if not train:
        return source.take(N_EXAMPLES - 7)
    return source.map(lambda example: slow(example, config.step_seconds / 12))


def slow(example, seconds):
    time.sleep(seconds)
    return example


class Model(nn.Module):
    """Two layers and what makes runs differ: dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not train)(x))


def experiment(config, data):
    return Experiment(
        model=Model(),
        loss=loss,
        optimizer=optax.adam(1e-2),
        inputs=lambda batch: batch["x"],
        metrics={"accuracy": lambda logits, batch: jnp.argmax(logits, -1) == batch["y"]},
        predict=lambda logits: jnp.argmax(logits, -1),
    )


def loss(logits, batch):
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    number = batch["number"]
    return value, {"number": number.mean(), "number_squared": (number**2).mean()}
