"""A fixture that trains a model of any library for a few steps."""

import jax
import numpy as np
import optax
import pytest

from tekoa.core import step as steps


@pytest.fixture
def train():
    """Returns `train(fns, n)` -> (state after n Adam steps, losses)."""

    def run(fns, n, *, loss=lambda out, y: ((out - y) ** 2).mean(), data=None, **options):
        tx = optax.adam(1e-2)
        data = data or _data()
        precision = options.get("precision", "float32")
        state = steps.init_state(
            fns, tx, jax.random.key(0), inputs=(data[0][0],), precision=precision
        )
        step = jax.jit(steps.make_train_step(fns, loss, tx, **options), donate_argnums=0)
        losses = []
        for i in range(n):
            state, output = step(state, data[i % len(data)])
            losses.append(output.loss)
        return state, [float(x) for x in losses]

    return run


def _data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 16, 8)).astype(np.float32)
    return [(a, a[:, :3] ** 2) for a in x]
