"""Small models of several kinds that train well, on data with a lot of noise."""

import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import linen as nn

from tekoa import data as data_lib
from tekoa.estimator import Experiment

DEFAULTS = {
    "train_pattern": "train",
    "train_batch_size": 8,
    "train_shuffle_buf": 300,
    "random_seed": 1,
    "progress": False,
    "max_train_steps": 120,
    "check_every_steps": 4,
}


def get_config():
    return ml_collections.ConfigDict({"kind": "mlp", "outliers": False})


def open_data(config, pattern, train):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 8, 8)).astype(np.float32)
    noise = rng.standard_t(2, size=300) if config.outliers else rng.normal(size=300)
    y = x[:, 0].sum(1) + noise
    return data_lib.as_source({"x": x, "y": y.astype(np.float32)})


class Model(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x, train=False):
        if self.kind == "autoencoder":
            code = nn.tanh(nn.Dense(6)(x.reshape(x.shape[0], -1)))
            return nn.Dense(64)(code).reshape(x.shape)
        if self.kind == "conv":
            x = nn.relu(nn.Conv(6, (3, 3))(x[..., None]))
        elif self.kind == "attention":
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        elif self.kind == "recurrent":
            x = nn.RNN(nn.GRUCell(6))(x)
        x = nn.Dense(12)(x.reshape(x.shape[0], -1))
        if self.kind == "norm":
            x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1)(nn.relu(x))[:, 0]


def experiment(config, data):
    target = "x" if config.kind == "autoencoder" else "y"
    return Experiment(
        model=Model(config.kind),
        loss=lambda out, batch: jnp.mean((out - batch[target]) ** 2),
        optimizer="auto",
        inputs=lambda batch: batch["x"],
    )
