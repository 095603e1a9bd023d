import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tekoa.bridges.any_model import as_model_fns
from tekoa.core.model import ModelFns

RNG = np.random.default_rng(0)
SIZES = {"w1": (8, 16), "b1": (16,), "w2": (16, 3), "b2": (3,)}
W = {name: (RNG.normal(size=size) * 0.3).astype(np.float32) for name, size in SIZES.items()}
X = RNG.normal(size=(50, 32, 8)).astype(np.float32)
DATA = [(x, y) for x, y in zip(X, RNG.integers(0, 3, (50, 32)), strict=True)]


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, kernel_init=_constant("w1"), bias_init=_constant("b1"))(x)
        return nn.Dense(3, kernel_init=_constant("w2"), bias_init=_constant("b2"))(nn.relu(x))


def _constant(name):
    return lambda *_: jnp.array(W[name])


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        for layer, i in ((self.a, 1), (self.b, 2)):
            layer.kernel[...], layer.bias[...] = W[f"w{i}"], W[f"b{i}"]

    def __call__(self, x):
        return self.b(jax.nn.relu(self.a(x)))


class EquinoxNet(eqx.Module):
    weights: dict

    def __call__(self, x):
        return forward(self.weights, x)


def forward(p, x):
    return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def cross_entropy(out, y):
    return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()


def models():
    linen = LinenNet()
    return {
        "linen": (linen, None),
        "linen functions": (linen.init, linen.apply),
        "nnx": (NnxNet(nnx.Rngs(0)), None),
        "equinox": (EquinoxNet(jax.tree.map(jnp.array, W)), None),
        "functions": (W, forward),
    }


def test_all_libraries_give_the_same_losses_to_the_bit(train):
    losses = {
        name: train(as_model_fns(model, apply), 50, loss=cross_entropy, data=DATA)[1]
        for name, (model, apply) in models().items()
    }
    first = losses["linen"]
    assert len(set(first)) == 50
    assert first[-1] < first[0]
    assert {name: run == first for name, run in losses.items()} == dict.fromkeys(losses, True)


def test_model_fns_are_returned_unchanged():
    fns = ModelFns(init=lambda *_: None, apply=lambda *_: None)
    assert as_model_fns(fns) is fns


def test_a_partial_of_linen_init_is_recognized():
    model = LinenNet()
    fns = as_model_fns(functools.partial(model.init), model.apply)
    assert sorted(fns.init(jax.random.key(0), (X[0],))[0]) == ["Dense_0", "Dense_1"]


def haiku_net(x):
    return hk.Linear(3)(x)


def test_haiku_pairs_are_recognized():
    fns = as_model_fns(hk.transform(haiku_net))
    assert list(fns.init(jax.random.key(0), (X[0],))[0]) == ["linear"]


@pytest.mark.parametrize("model", ["resnet", 3, {"w": 1}])
def test_error_lists_the_supported_models(model):
    with pytest.raises(
        TypeError, match=f"Cannot create a model from {type(model).__name__}. Pass a"
    ):
        as_model_fns(model)


def test_init_is_an_alias_of_model():
    fns = as_model_fns(init=W, apply=forward)
    assert sorted(fns.init(jax.random.key(0), (X[0],))[0]) == sorted(W)
    with pytest.raises(TypeError, match="either model or init"):
        as_model_fns(W, forward, init=W)
