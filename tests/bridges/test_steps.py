import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tekoa
from tekoa.optim import classic

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
MODELS = {
    "linen": lambda: nn.Dense(1),
    "nnx": lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.Linear(3, 1, key=jax.random.key(0)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), classic.sgd(0.1), "sgd"])
def test_a_module_goes_into_every_step(make, optimizer):
    model = make()
    loss = lambda out, y: jnp.mean((out[:, 0] - y) ** 2)
    state = tekoa.init_state(model, optimizer, jax.random.key(0), inputs=(X,), ema=0.9)
    step = jax.jit(tekoa.make_train_step(model, loss, optimizer, ema=0.9))
    losses = []
    for _ in range(3):
        state, output = step(state, (X, X.sum(1)))
        losses.append(float(output.loss))
    assert losses[2] < losses[1] < losses[0]
    arguments = (state.params, state.variables, (X, X.sum(1)), jax.random.key(0))
    outputs, _ = tekoa.make_predict_step(model)(*arguments)
    means, _ = tekoa.make_eval_step(model, {"loss": loss})(*arguments)
    expected = float(loss(outputs, X.sum(1)))
    assert float(means["loss"].compute()) == pytest.approx(expected, rel=1e-6)
    assert expected < losses[2]


def test_an_optimizer_that_depends_on_the_model_is_refused():
    with pytest.raises(ValueError, match=r"'auto' depends on the model.*Pass the name to fit"):
        tekoa.make_train_step(nn.Dense(1), None, "auto")
