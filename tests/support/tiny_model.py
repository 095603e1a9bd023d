"""A model file that trains in no time. Its settings make it slow, or its data bad."""

import signal
import time

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa import Experiment, data

N_EXAMPLES, N_HELD_OUT, BATCH_SIZE = 60, 53, 12

ALWAYS = {
    "train_pattern": "train",
    "eval_pattern": "eval",
    "pred_pattern": "pred",
    "train_batch_size": BATCH_SIZE,
    "valid_batch_size": 16,
    "eval_batch_size": 16,
    "pred_batch_size": 16,
    "train_shuffle_buf": 100,
    "max_train_steps": 60,
    "check_every_steps": 5,
    "max_ckpt": 100,
    "random_seed": 4,
    "steps_per_dispatch": "1",
    "progress": False,
    "check_ckpt_every_secs": 1,
}
DEFAULTS = ALWAYS


def fail(*_):
    raise OSError("failed as requested")


# A test makes a process fail at any point by this signal.
signal.signal(signal.SIGUSR2, fail)


def get_config():
    """Settings: an example with NaN (-1: none), seconds per step and evaluation, learning rate."""
    return ml_collections.ConfigDict(
        {"poison": -1, "step_seconds": 0.0, "eval_seconds": 0.0, "rate": 1e-2}
    )


def open_data(config, pattern, train):
    x = np.random.default_rng(0).normal(size=(N_EXAMPLES, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int32)
    if train and config.poison >= 0:
        x[config.poison] = np.nan
    examples = {"x": x, "y": y, "number": np.arange(N_EXAMPLES, dtype=np.float32)}
    if train:
        return slow_down(data.as_source(examples), config.step_seconds / BATCH_SIZE)
    return slow_down(data.as_source(examples).take(N_HELD_OUT), config.eval_seconds / N_HELD_OUT)


def slow_down(source, seconds_per_example):
    def wait(example):
        time.sleep(seconds_per_example)
        return example

    return source.map(wait) if seconds_per_example else source


class Model(nn.Module):
    """Two layers with dropout: a resumed run must draw the same numbers."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not train)(x))


def experiment(config, data):
    return Experiment(
        model=Model(),
        loss=loss,
        optimizer=optax.adam(config.rate),
        inputs=lambda batch: batch["x"],
        metrics={
            "accuracy": lambda logits, batch: jnp.argmax(logits, -1) == batch["y"],
            "cost": cross_entropy,
        },
        predict=lambda logits: jnp.argmax(logits, -1),
    )


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def loss(logits, batch):
    """Returns the loss, and sums that show whether every example was used once per epoch."""
    number = batch["number"]
    metrics = {"number": number.mean(), "number_squared": (number**2).mean()}
    return cross_entropy(logits, batch), metrics
