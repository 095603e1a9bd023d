"""A model file in the style of JEstimator's: its imports, its FlaxFormer layer, its scan."""

import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import variable_with_axes
from flaxformer.components.dense import DenseGeneral
from jestimator import amos, amos_helper
from jestimator.data.pipeline_rec import rec_data
from jestimator.modeling import Dropout, global_kwargs, normalize_loss_by_size
from jestimator.states import Evaluator, InferState, MeanMetrics, Predictor, TrainState


class Cell(nn.Module):
    """A recurrent cell whose scan does not name the stream of its dropout."""

    def setup(self):
        self.dropout = Dropout(0.5)
        self.dense = DenseGeneral(3, use_bias=True, kernel_axis_names=("x", "y"))

    def __call__(self, xs, carry):
        def body(self, carry, x):
            carry = jnp.tanh(self.dense(self.dropout(jnp.concatenate([carry, x], -1))))
            return carry, carry

        scan = nn.scan(
            body,
            in_axes=1,
            out_axes=1,
            variable_broadcast="params",
            split_rngs={"params": False},
        )
        return scan(self, carry, xs)


class Model(nn.Module):
    """Keeps its memory from batch to batch."""

    batch_size: int

    def setup(self):
        self.cell = Cell()
        shape = (self.batch_size, 3)
        self.memory = variable_with_axes(
            "context", "memory", jnp.zeros, shape, axes=("data", "model")
        )

    @global_kwargs(pass_down=True)
    def __call__(self, x, y=None):
        last, out = self.cell(x, self.memory.value[: x.shape[0]])
        if y is None:
            return out[:, -1, 0]
        self.memory.value = last
        return normalize_loss_by_size(jnp.sum((out[:, -1, 0] - y) ** 2), y.size)


def get_config():
    module_config = ml_collections.ConfigDict()
    module_config.rate = 0.1
    return module_config


def load_config(global_flags):
    config = ml_collections.ConfigDict()
    config.update(global_flags.module_config)
    config.batch_size = global_flags.train_batch_size
    config.frozen = ml_collections.FrozenConfigDict(config)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 4, 2)).astype(np.float32)
    y = np.tanh(x.sum((1, 2))).astype(np.float32)

    def get_data_fn(feature_fn=None):
        fn = rec_data(lambda path: {"x": x, "y": y}, feature_fn=feature_fn, interleave=True)
        return lambda filenames, **options: fn(["in memory"], **options)

    config.train_data_fn = get_data_fn()
    config.valid_data_fn = get_data_fn()
    config.eval_data_fn = get_data_fn(lambda e: (e["y"], e["x"]))
    config.pred_data_fn = get_data_fn(lambda e: e["x"])
    return config


def get_train_state(config, rng):
    eta_fn = amos_helper.params_fn_from_assign_map({".*": 0.5})
    optimizer = amos.amos(config.rate, eta_fn, beta=0.9)
    metrics_mod = MeanMetrics.create("train_loss", "valid_loss")
    dummy = jnp.zeros((config.batch_size, 4, 2))
    return TrainState.create(metrics_mod, optimizer, Model(config.batch_size), rng, dummy)


def train_step(config, batch, state, metrics):
    (loss, (size, vars_)), grads = state.value_and_grad_apply_fn(has_aux=True)(
        state.params, batch["x"], batch["y"], enable_dropout=True
    )
    _, metrics = state.metrics_mod.apply(
        metrics, "train_loss", loss, size, method=MeanMetrics.update, mutable=["metrics"]
    )
    return state.apply_gradients(grads=grads).replace(_vars=vars_), metrics


def valid_step(config, batch, state, metrics):
    (loss, size), _ = state.apply_fn(
        state.variables(), batch["x"], batch["y"], mutable=state.mutable()
    )
    _, metrics = state.metrics_mod.apply(
        metrics, "valid_loss", loss, size, method=MeanMetrics.update, mutable=["metrics"]
    )
    return metrics


def get_infer_state(config):
    return InferState.create(Model(config.batch_size), jnp.zeros((1, 4, 2)))


def infer_step(config, batch, state):
    return state.replace(ret=state.apply_fn(state.variables(), batch))


def get_evaluator(config):
    def mse(gold, values):
        return float(np.mean((np.asarray(gold) - np.asarray(values)) ** 2))

    return Evaluator({"mse": (lambda y: y, mse)})


def get_predictor(config):
    return Predictor(lambda values: [str(y) for y in values])
