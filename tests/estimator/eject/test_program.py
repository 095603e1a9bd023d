"""The training of a model as plain code; see test_eject for what it computes."""

import ast

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa.core.metrics import Mean
from tekoa.core.model import ModelFns
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import program
from tekoa.estimator.model_file.experiment import Experiment

BATCH = {"x": np.ones((4, 3), np.float32)}


def code_of(model, loss=lambda out, batch: out.sum()):
    experiment = Experiment(
        model=model, loss=loss, optimizer=optax.sgd(1.0), inputs=lambda batch: batch["x"]
    )
    plain = program.plain_program(experiment, BATCH, drops_metrics=False, drops_boxes=False)
    ast.parse(plain.code)
    return plain.code


def test_code_has_only_what_the_model_needs():
    code = code_of(nn.Dense(2))
    assert 'outputs = model.apply({"params": params}, inputs(batch))\n' in code
    assert "variables, " not in code
    assert "dropout" not in code
    assert "mutable" in code_of(nn.Sequential([nn.BatchNorm(use_running_average=False)]))


def test_loss_with_a_count_is_divided():
    code = code_of(nn.Dense(2), lambda out, batch: (Mean(out.sum(), jnp.float32(2)), {"a": out}))
    assert "total, count = loss(outputs, batch)[0]" in code
    assert "g / count" in code


def test_functions_are_run_as_they_are():
    model = ModelFns(
        init=lambda rng, inputs: ({"w": jnp.ones(3)}, {}),
        apply=lambda params, variables, inputs, rng, train: (inputs[0] @ params["w"], {}),
    )
    assert "model.apply(params, {}, (inputs(batch),), rng=key, train=True)" in code_of(model)


def test_unknown_kind_is_refused():
    with pytest.raises((UsageError, TypeError)):
        code_of(object())
