"""A model file for four libraries, with dropout, whose training can be ejected."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from plain_helper import squared_error

import tekoa
from tekoa import data as data_lib
from tekoa.estimator import DataFacts, Experiment, UsageError

DEFAULTS = {
    "train_batch_size": 8,
    "train_pattern": "train",
    "max_train_steps": 20,
    "check_every_steps": 5,
    "train_shuffle_buf": 40,
    "random_seed": 5,
}


def get_config():
    return ml_collections.ConfigDict(
        {"library": "linen", "opt": {"rate": 0.01}, "optimizer": "", "width": 4}
    )


def open_data(config, pattern, train):
    x = np.random.default_rng(0).normal(size=(41, 3)).astype(np.float32)
    return data_lib.as_source({"x": x, "y": x.sum(axis=1)})


class Linen(nn.Module):
    n: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.n)(x))
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(x))[:, 0]


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))[:, 0]


class Equinox(eqx.Module):
    last: eqx.nn.Linear
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        a, b = jax.random.split(jax.random.key(0))
        self.first, self.last = eqx.nn.Linear(3, 4, key=a), eqx.nn.Linear(4, 1, key=b)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, key=None):
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))[0]


def haiku_forward(x):
    x = jax.nn.relu(hk.Linear(4)(x))
    return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.2, x))[:, 0]


# Not used in training.
def unused():
    return data_lib


def make_model(library, width):
    if library == "linen":
        return Linen(width)
    if library == "nnx":
        return Nnx(nnx.Rngs(0))
    return Equinox() if library == "equinox" else hk.transform(haiku_forward)


def make_optimizer(config, data):
    if config.optimizer == "amos":
        rate = lambda step: jnp.minimum(1.0, step / config.width) / data.n_batches
        return tekoa.amos(rate, lambda name, shape: 0.5, beta=0.98, momentum=0.9)
    return config.optimizer or optax.adamw(config["opt"].rate)


def experiment(config, data: DataFacts) -> Experiment:
    if config.width < 1:
        raise UsageError("Too narrow.")
    return Experiment(
        model=make_model(config.library, config.width),
        loss=lambda out, batch: squared_error(out, batch["y"]),
        optimizer=make_optimizer(config, data),
        inputs=lambda batch: batch["x"],
        metrics={"error": lambda out, batch: squared_error(out, batch["y"])},
    )
