import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.bridges import optimizers
from tekoa.optim import classic

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def final_params(optimizer):
    task = tekoa.TrainTask(
        apply=lambda params, x: x @ params["w"],
        optimizer=optimizer,
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=[(X, X.sum(1))] * 3,
    )
    loop = tekoa.TrainLoop({"w": jnp.ones(3)}, task, n_steps=3, n_steps_per_checkpoint=3)
    list(loop)
    return loop.state.params["w"]


@pytest.mark.parametrize("make", [classic.momentum, lambda *a: tuple(classic.momentum(*a))])
def test_a_triple_is_an_optimizer(make):
    expected = final_params(optax.sgd(0.1, momentum=0.9))
    np.testing.assert_allclose(final_params(make(0.1, 0.9)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [(3, "got 3"), (optax.adam, r"Call it: adam\(\.\.\.\)")],
)
def test_anything_else_is_refused_with_what_may_be_passed(optimizer, message):
    with pytest.raises(TypeError, match=f"optax.adam.*triple.*nnx.Optimizer; .*{message}"):
        final_params(optimizer)


def test_the_error_of_a_transformation_is_its_own():
    def fail(*_):
        raise ValueError("no such label")

    tx = optax.GradientTransformation(fail, fail)
    wrapped = optimizers.accepting_native(tx, nnx.State)
    with pytest.raises(ValueError, match="no such label"):
        wrapped.init({"w": jnp.ones(3)})
    assert optimizers.accepting_native(tx, None) is tx
