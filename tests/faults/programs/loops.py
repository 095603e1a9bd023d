"""A small model that uses every part of a state, in Linen and in NNX.

Carry, batch norm, dropout, moving average, metric sums, shuffled data of several epochs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from tekoa import TrainLoop, TrainTask, data
from tekoa.bridges.nnx import Carry

N_STEPS, EVERY = 60, 5
COLLECTIONS = {"init": ["params", "dropout"], "apply": ["dropout"]}


class LinenModel(nn.Module):
    """A hand-written recurrent layer between batch norm and dropout."""

    @nn.compact
    def __call__(self, x):
        carry = self.variable("carry", "h", jnp.zeros, (x.shape[0], 8))
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        h = jnp.tanh(nn.Dense(8)(x) + nn.Dense(8, name="again")(carry.value))
        carry.value = jax.lax.stop_gradient(h)
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=False)(h))[:, 0]


class NnxModel(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.inner, self.again = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.outer, self.drop = nnx.Linear(8, 1, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.carry = Carry(jnp.zeros((12, 8)))

    def __call__(self, x):
        h = jnp.tanh(self.inner(self.norm(x)) + self.again(self.carry[...]))
        self.carry[...] = jax.lax.stop_gradient(h)
        return self.outer(self.drop(h))[:, 0]


def batches(seed=7, batch_size=12, n_examples=100, poison=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n_examples, 6)).astype(np.float32)
    if poison is not None:
        x[poison] = np.nan
    source = data.as_source({"x": x, "y": np.sin(x.sum(1)), "i": np.arange(n_examples)})
    # 100 examples in batches of 12: epochs end inside of batches.
    return source.batches(batch_size, seed=seed, shuffle=True)


def split(batch):
    return (batch["x"],), (batch["y"],)


def loss(out, y):
    error = (out - y) ** 2
    return jnp.mean(error), {"largest": jnp.max(error)}


def make_loop(reader, model, feed=None, **options):
    task = {"optimizer": optax.adam(1e-2), "loss": loss, "split": split}
    options = {"n_steps": N_STEPS, "n_steps_per_checkpoint": EVERY, **options}
    return TrainLoop(
        reader(model.init if isinstance(model, nn.Module) else model),
        TrainTask(
            apply=model.apply if isinstance(model, nn.Module) else None,
            data=batches() if feed is None else feed,
            **task,
        ),
        rnkey=jax.random.key(3),
        collections=COLLECTIONS if isinstance(model, nn.Module) else None,
        ema=0.9,
        **options,
    )


def linen_loop(reader):
    return make_loop(reader, LinenModel())


def nnx_loop(reader):
    return make_loop(reader, NnxModel(nnx.Rngs(0)))


def frequent_loop(reader):
    return make_loop(reader, LinenModel(), n_steps=300, n_steps_per_checkpoint=2)


def mixed_batches():
    """A mixture of packed documents, in which the smaller source starts over again and again."""
    rng = np.random.default_rng(0)
    sources = {}
    for name, n in (("long", 90), ("short", 25)):
        documents = [{"tokens": rng.normal(size=size)} for size in rng.integers(1, 6, n)]
        sources[name] = data.as_source(documents).pack(6)
    return data.mix(sources, {"long": 0.6, "short": 0.4}).map_batch(inputs_of_tokens)


def inputs_of_tokens(batch):
    x = np.where(batch["token_mask"], batch["tokens"], 0.0).astype(np.float32)
    return {"x": x + batch["segments"], "y": np.sin(x.sum(1))}


def mixed_loop(reader):
    feed = mixed_batches().batches(12, seed=7, shuffle=True)
    return make_loop(reader, LinenModel(), feed)


class LengthModel(nn.Module):
    """Sees sequences of any length."""

    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(8)(x[..., None])).mean(axis=1)
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=False)(h))[:, 0]


def scheduled_loop(reader):
    """Rows and lengths change, each in the middle of a group of steps and of an epoch."""
    feed = mixed_batches().batches(
        {0: 12, 17: 20, 38: 8}, length={0: 3, 23: 6}, seed=7, shuffle=True
    )
    return make_loop(reader, LengthModel(), feed, accumulate=2, steps_per_dispatch=3)
