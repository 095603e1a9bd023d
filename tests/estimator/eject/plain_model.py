"""A model file for three libraries, with dropout, whose training can be ejected."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from tekoa import data as data_lib
from tekoa.estimator import DataFacts, Experiment

DEFAULTS = {
    "train_batch_size": 8,
    "train_pattern": "train",
    "max_train_steps": 20,
    "check_every_steps": 5,
    "train_shuffle_buf": 40,
    "random_seed": 5,
}


def get_config():
    return ml_collections.ConfigDict({"library": "linen", "opt": {"rate": 0.01}, "optimizer": ""})


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
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        a, b = jax.random.split(jax.random.key(0))
        self.first, self.last = eqx.nn.Linear(3, 4, key=a), eqx.nn.Linear(4, 1, key=b)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, key=None):
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))[0]


# Not used in training.
def unused():
    return data_lib


def make_model(library):
    return {"linen": Linen, "nnx": lambda: Nnx(nnx.Rngs(0)), "equinox": Equinox}[library]()


def experiment(config, data: DataFacts) -> Experiment:
    return Experiment(
        model=make_model(config.library),
        loss=lambda out, batch: jnp.mean((out - batch["y"]) ** 2),
        optimizer=config.optimizer or optax.adamw(config["opt"].rate),
        inputs=lambda batch: batch["x"],
    )
