"""The functions that train, as code."""

import pathlib
import sys

import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import tekoa
from tekoa.estimator import Experiment
from tekoa.estimator.eject.source import Code
from tekoa.estimator.eject.training import plain_training, trace

BATCH = {"x": jnp.ones((2, 3))}


def mean_square(out, batch):
    return jnp.mean(out**2)


def total_and_count(out, batch):
    return tekoa.Mean(jnp.sum(out), jnp.float32(2)), {"rows": out[:, 0]}


@pytest.mark.parametrize(
    ("loss", "lines"),
    [
        (mean_square, ["return mean_square(outputs, batch)", "loss, grads = jax"]),
        (
            total_and_count,
            ["return total_and_count(outputs, batch)[0]", "(loss, count), grads", "/ count"],
        ),
    ],
)
def test_loss_is_read_as_it_is_returned(loss, lines):
    experiment = Experiment(
        model=nn.Dense(2), loss=loss, optimizer=optax.sgd(1.0), inputs=lambda batch: batch["x"]
    )
    seen = trace(experiment, BATCH, pathlib.Path(__file__).parent)
    assert {*seen.ran} == {__file__}
    code = Code(sys.modules[__name__], seen.ran)
    _, text = plain_training(experiment, seen, code, clip_norm=0.5)
    assert "0.5 / jnp.maximum(optax.global_norm(grads), 1e-30)" in text
    for line in lines:
        assert line in text
    assert code.blocks["inputs"] == 'def inputs(batch):\n    return batch["x"]'
    assert loss.__name__ in code.blocks
