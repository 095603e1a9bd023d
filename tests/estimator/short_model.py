"""The model of `long_model.py` in the short form."""

import jax.numpy as jnp
import long_model
import optax

from tekoa import data
from tekoa.estimator import Experiment

get_config = long_model.get_config


def open_data(config, pattern, *, train):
    x, y = long_model.examples(config.n_train if train else config.n_eval, seed=1 if train else 2)
    return data.as_source([{"x": a, "y": b} for a, b in zip(x, y)])


def experiment(config, facts):
    return Experiment(
        model=long_model.Net(),
        loss=lambda out, batch: jnp.mean((out - batch["y"]) ** 2),
        optimizer=optax.adam(config.rate),
        inputs=lambda batch: batch["x"],
        metrics={"mse": lambda out, batch: (out - batch["y"]) ** 2},
        predict=lambda out: out,
    )
