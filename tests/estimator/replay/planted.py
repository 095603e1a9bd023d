"""Models with a fault each, to be found by `tekoa why`. The marked line is the one to be named."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import tekoa
from tekoa.extensions import checkpoint_files


def rows(n=16, **changes):
    """Returns rows of data; `changes` are values by row, for x or y."""
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    for row, value in changes.get("x", {}).items():
        x[row, 1] = value
    for row, value in changes.get("y", {}).items():
        y[row] = value
    return {"x": x, "y": y}


class Net(nn.Module):
    """A Linen model with an operation of choice between two layers."""

    middle: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="first")(x)
        x = x if self.middle is None else self.middle(x)
        return nn.Dense(1, name="last")(x)


class NnxNet(nnx.Module):
    """The same in NNX."""

    def __init__(self, middle):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.middle = middle

    def __call__(self, x):
        return self.last(self.middle(self.first(x)))


class EqxNet(eqx.Module):
    """The same in Equinox."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear
    middle: object = eqx.field(static=True)

    def __init__(self, middle):
        keys = jax.random.split(jax.random.key(0))
        self.first, self.last = eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.Linear(4, 1, key=keys[1])
        self.middle = middle

    def __call__(self, x):
        return self.last(self.middle(self.first(x)))


def squared(out, y):
    return ((out - y) ** 2).mean()


def log_of_zero(x):
    return jnp.log(jax.nn.relu(x))  # HERE: log_of_zero


def division(x):
    return x / (jnp.floor(x) - jnp.floor(x))  # HERE: division


def overflow(x):
    grown = jnp.exp(200 * (1 + jnp.abs(x)))  # HERE: overflow
    return grown / grown.sum(-1, keepdims=True)


def broken_norm(x):
    return x / jnp.sqrt(jnp.sum((x - x) ** 2, -1, keepdims=True))  # HERE: broken_norm


def root_gradient(x):
    return jnp.sqrt(x * 0.0)  # HERE: root_gradient


def masked(x):
    mask = jnp.arange(x.shape[-1]) < 3
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))


def all_masked(x):
    scores = jnp.where(x > 1e9, x, -jnp.inf)
    return jax.nn.softmax(scores)  # HERE: all_masked


def safe_log(x):
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0)


def cancelled(x):
    return x / ((1 + 1e-3 * jax.nn.sigmoid(x)) - 1)  # HERE: cancelled


def too_large(x):
    return (x + 300) * 300.0  # HERE: too_large


def too_steep(x):
    zero = x - jax.lax.stop_gradient(x)
    return jnp.sin(zero * 6e4) * 6e4  # HERE: too_steep


def steep(x):
    return (x - jax.lax.stop_gradient(x)) * 100.0  # HERE: steep


def log_of_prediction(out, y):
    return -jnp.mean(jnp.log(jnp.clip(out * y, 0)))  # HERE: log_of_prediction


def save_run(
    directory, model, data, *, loss=squared, optimizer=None, spoil=None, n_steps=12, **options
):
    """Trains a run that stops at its first bad step; returns the function that makes its loop."""
    options = {"n_steps_per_checkpoint": 4, "stdout": False, **options}

    def make_loop(read):
        task = tekoa.TrainTask(
            optimizer=optimizer or optax.adam(1e-3),
            loss=loss,
            data=tekoa.data.as_source(data).batches(8, seed=1, shuffle=True),
            inputs="x",
            targets="y",
        )
        return tekoa.TrainLoop(read(model), task, rng=jax.random.key(2), **options)

    loop = make_loop(lambda model: model)
    with tekoa.store.Store(directory, keep=[tekoa.store.KeepLast(9)]) as store:

        def save(checkpoint):
            if spoil is not None and checkpoint.step == 4:
                checkpoint = dataclasses.replace(checkpoint, state=spoil(checkpoint.state))
            checkpoint_files.save(store, checkpoint)

        save(loop.checkpoint())
        try:
            for checkpoint in loop.until(4 if spoil else n_steps):
                save(checkpoint)
        except tekoa.NonFiniteError:
            if loop.step % 4:
                save(loop.checkpoint())
    return make_loop
