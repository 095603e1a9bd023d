"""Checkpoints for stages, without training."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.loop.checkpoint import Summary


@pytest.fixture
def summary():
    """`summary(step, eval={"loss": 1.0})` -> a summary of that step."""
    # Not made at import: pytest may import this file before it sets the number of devices.
    fns = model_fns({"w": jnp.ones((2, 2))}, lambda p, x: x @ p["w"])
    state = steps.init_state(fns, optax.adam(0.1), jax.random.key(0), inputs=(jnp.ones((1, 2)),))

    def make(step=1, *, n_completed_steps=1, elapsed_time=0.5, **metrics):
        return Summary(
            state=state.replace(step=jnp.int32(step)),
            step=step,
            loss=jnp.float32(0.5),
            grads=None,
            n_completed_steps=n_completed_steps,
            elapsed_time=elapsed_time,
            data_state={"next": step},
            facts={"steps_per_dispatch": 1},
            setup={"load_seconds": 1.0, "init_seconds": 2.0, "n_weights": 4, "n_bytes": 16},
            metrics=metrics,
        )

    make.params = types.SimpleNamespace(fns=fns, state=state)
    return make
