"""The parts of an ejected file."""

from types import SimpleNamespace

import jax.numpy as jnp
import optax
import plain_model
import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.forms import _short
from tekoa.estimator.model_file.experiment import DataFacts

CONFIG = plain_model.get_config()
BATCH = {"x": jnp.ones((8, 3)), "y": jnp.ones(8)}
FACTS = DataFacts(info=None, n_examples=40, batch_size=8, sample=BATCH)


def parts_of(**changes):
    experiment = plain_model.experiment(CONFIG, FACTS)
    vars(experiment).update(changes)
    config = SimpleNamespace(clip_norm=None)
    run = SimpleNamespace(module=plain_model, settings=CONFIG, config=config)
    program = SimpleNamespace(experiment=lambda kind: experiment, facts=lambda kind: FACTS)
    return _short(run, program, optax.sgd(0.5), BATCH, True)


def test_sections_have_what_they_are_named_after():
    sections = parts_of().sections
    assert [*sections] == ["Model and loss", "Optimizer", "Training"]
    model, optimizer, training = ("\n".join(blocks) for blocks in sections.values())
    assert "model = Linen(" in model
    assert "def squared_error" in model
    assert optimizer == "tx = optax.chain(optax.identity(), optax.scale(step_size=-0.5))"
    assert "def are_finite" in training
    assert "def train_step" in training


def test_training_of_some_parameters_is_refused():
    with pytest.raises(UsageError, match="trainable"):
        parts_of(trainable="Dense_0")
