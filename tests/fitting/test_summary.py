import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tekoa

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
Y = np.zeros(8, np.int32)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


MODELS = {
    "linen": (LinenNet(), None, 21 + 12),
    "nnx": (nnx.Linear(6, 3, rngs=nnx.Rngs(0)), None, 21),
    "equinox": (eqx.nn.Linear(6, 3, key=jax.random.key(0)), None, 21),
    "haiku": (hk.transform(lambda x: hk.Linear(3)(jnp.tanh(x))), None, 21),
    "functions": ({"w": jnp.zeros((6, 3))}, lambda params, x: x @ params["w"], 18),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_every_library_is_summarised(name):
    model, apply, n_params = MODELS[name]
    table = tekoa.summary(model, (X, Y), loss="cross_entropy", apply=apply)
    assert (table.n_params, table.n_bytes) == (n_params, 4 * n_params)
    assert table.outputs == "batch float32[8,3]"
    assert table.flops / 8 >= 2 * 6 * 3
    assert all(row.scale is not None for row in table.rows)
    assert "output" in str(table)


def test_shapes_are_enough_and_nothing_is_run():
    def apply(params, x):
        return x @ params["w"]

    shape = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    table = tekoa.summary({"w": jnp.zeros((1000, 1000))}, shape, apply=apply)
    assert "1,000,000 parameters, 4 MB" in str(table)
    assert [row.scale for row in table.rows] == [None]


def test_other_variables_are_counted():
    table = tekoa.summary(LinenNet(), X)
    assert table.n_variable_bytes == 2 * 6 * 4
    assert "Other variables: 48 B" in str(table)
