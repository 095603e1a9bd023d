"""A tiny problem for loops, a linear fit, that compiles quickly."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.loop.task import TrainTask
from tekoa.loop.train import TrainLoop

PARAMS = {"w": np.float32([0.5, -1.0, 2.0]), "b": np.float32(0.1)}


def apply(params, x):
    return x @ params["w"] + params["b"]


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def make_data(n, n_rows=8, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_rows, 3)).astype(np.float32)
    return [(a, a.sum(1) + 1) for a in x]


def make_loop(data=None, *, n_steps=12, tx=None, model=PARAMS, apply=apply, loss=mse, **options):
    data = make_data(n_steps) if data is None else data
    task = TrainTask(apply=apply, optimizer=tx or optax.adam(0.05), loss=loss, data=data)
    options.setdefault("n_steps_per_checkpoint", 4)
    return TrainLoop(model, task, n_steps=n_steps, rng=jax.random.key(1), **options)


@pytest.fixture
def line():
    """The parts of the problem, and `loop(...)`, which creates a `TrainLoop` from them."""
    return types.SimpleNamespace(
        params=PARAMS, apply=apply, mse=mse, data=make_data, loop=make_loop
    )
