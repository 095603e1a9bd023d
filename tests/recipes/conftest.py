"""A tiny network in Linen and in NNX, and a problem for it."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tekoa


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="out")(nn.tanh(nn.Dense(8, name="hidden")(x)))


class NnxMLP(nnx.Module):
    def __init__(self):
        self.hidden = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(8, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def make_data(n=12, n_rows=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, n_rows, 4)).astype(np.float32)
    return [(a, np.stack([a.sum(1), a[:, 0] * a[:, 1]], 1)) for a in x]


def make_loop(model, tx, *, n_steps=6, data=None, **options):
    task = tekoa.TrainTask(optimizer=tx, loss=mse, data=data or make_data())
    options.setdefault("n_steps_per_checkpoint", 3)
    return tekoa.TrainLoop(model, task, n_steps=n_steps, rng=jax.random.key(1), **options)


@pytest.fixture
def toy():
    """Models by library, `loss`, `data(n)` and `loop(model, tx, ...)`."""
    models = {"linen": LinenMLP, "nnx": NnxMLP}
    return types.SimpleNamespace(models=models, loss=mse, data=make_data, loop=make_loop)


@pytest.fixture(params=["linen", "nnx"])
def model(request, toy):
    """A new model of each library."""
    return toy.models[request.param]()
