"""A model file in the long form, with a mutable collection, dropout and its own data."""

import os
import signal

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa.estimator import Evaluator, InferState, MeanMetrics, Predictor, TrainState


def examples(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32) + 1
    return x, (x.sum(1) + 0.1 * rng.normal(size=n)).astype(np.float32)


class Net(nn.Module):
    """Subtracts the running mean from its input."""

    @nn.compact
    def __call__(self, x, train=False):
        mean = self.variable("average", "mean", jnp.zeros, x.shape[-1:])
        if train:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        x = nn.Dropout(0.2, deterministic=not train)(x - mean.value)
        return nn.Dense(1)(x)[:, 0]

    def loss(self, x, y, train=False):
        return jnp.mean((self(x, train) - y) ** 2), len(x)


def get_config():
    return ml_collections.ConfigDict({"rate": 0.05, "n_train": 40, "n_eval": 21})


def load_config(flags):
    config = ml_collections.ConfigDict(flags.module_config)
    config.mode = flags.mode
    x, y = examples(config.n_train, seed=1)
    held_x, held_y = examples(config.n_eval, seed=2)

    def train_data(filenames, shard_num=1, shard_index=0, epochs=1, num_take=-1):
        return [{"x": a, "y": b} for a, b in zip(x, y)]

    def valid_data(filenames, shard_num=1, shard_index=0, epochs=1, num_take=-1):
        return {"x": held_x, "y": held_y}

    def eval_data(filenames, shard_num=1, shard_index=0, epochs=1, num_take=-1):
        for a, b in list(zip(held_x, held_y))[: None if num_take < 0 else num_take]:
            yield b, {"x": a}

    def pred_data(filenames, shard_num=1, shard_index=0, epochs=1, num_take=-1):
        return [{"x": a} for a in held_x]

    config.train_data_fn = train_data
    config.valid_data_fn = valid_data
    config.eval_data_fn = eval_data
    config.pred_data_fn = pred_data
    return config


def get_train_state(config, rng):
    return TrainState.create(
        MeanMetrics.create("train_loss", "valid_loss"),
        optax.adam(config.rate),
        Net(),
        rng,
        jnp.zeros((1, 3)),
        save_mutable=True,
    )


def gather(state, metrics, name, loss, n_rows):
    _, metrics = state.metrics_mod.apply(
        metrics, name, loss * n_rows, n_rows, method=MeanMetrics.update, mutable=["metrics"]
    )
    return metrics


def train_step(config, batch, state, metrics):
    (loss, (n_rows, variables)), grads = state.value_and_grad_apply_fn(has_aux=True)(
        state.params, batch["x"], batch["y"], train=True, method=Net.loss
    )
    metrics = gather(state, metrics, "train_loss", loss, n_rows)
    return state.apply_gradients(grads=grads).replace(_vars=variables), metrics


def valid_step(config, batch, state, metrics):
    loss, n_rows = state.apply_fn(state.variables(), batch["x"], batch["y"], method=Net.loss)
    return gather(state, metrics, "valid_loss", loss, n_rows)


def monitor_train(config, state, metrics, writer):
    writer.scalar("mine/bias", state.params["Dense_0"]["bias"][0], step=state.step)
    if int(state.step) == int(os.environ.get("DIE_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


def get_infer_state(config):
    return InferState.create(Net(), jnp.zeros((1, 3)))


def infer_step(config, batch, state):
    assert config.mode in ("eval_once", "eval_wait", "predict")
    return state.replace(ret=state.apply_fn(state.variables(), batch["x"]))


def get_evaluator(config):
    def mse(gold, predicted):
        return np.mean((np.float64(gold) - np.float64(predicted)) ** 2)

    return Evaluator({"mse": (list, mse), "n": (list, lambda gold, predicted: len(gold))})


def get_predictor(config):
    return Predictor(lambda results: [f"{y:.6f}" for y in results], pre_str="y")
