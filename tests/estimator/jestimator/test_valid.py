import logging
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa.data import DataError
from tekoa.estimator import MeanMetrics, TrainState
from tekoa.estimator.jestimator.train import OwnTraining
from tekoa.estimator.jestimator.valid import ScalarWriter, Validation
from tekoa.loop.train import TrainLoop


def get_train_state(config, rng):
    metrics = MeanMetrics.create("train_loss", "valid_loss")
    return TrainState.create(metrics, optax.sgd(0.1), nn.Dense(1), rng, jnp.zeros((1, 2)))


def add(state, metrics, name, total, count):
    _, metrics = state.metrics_mod.apply(
        metrics, name, total, count, method=MeanMetrics.update, mutable=["metrics"]
    )
    return metrics


def train_step(config, batch, state, metrics):
    return state.replace(step=state.step + 1), add(state, metrics, "train_loss", batch.sum(), 1)


def valid_step(config, batch, state, metrics):
    return add(state, metrics, "valid_loss", batch.sum(), len(batch))


def full_only(config, batch, state, metrics):
    return valid_step(config, batch + jnp.zeros((3, 1)), state, metrics)


def validated(data, stop_flag=None, name="", **functions):
    """Returns validation metrics before training, and all metrics after two steps."""
    functions = {"get_train_state": get_train_state, "train_step": train_step, **functions}
    module = types.SimpleNamespace(valid_step=functions.pop("valid_step", valid_step), **functions)
    batches = [np.full((1, 2), n, np.float32) for n in (1, 2)]
    training = OwnTraining(module, None, None, data=batches)
    loop = TrainLoop(None, training, n_steps_per_checkpoint=2)
    stage = Validation(
        module, None, None, training=training, data=data, stop_flag=stop_flag, name=name
    )
    before = stage(loop.checkpoint()).metrics["train"]
    return before, stage(next(iter(loop))).metrics


def rows(*sizes):
    return [np.ones((n, 1), np.float32) * 2 for n in sizes]


def test_training_and_validation_metrics_are_reported_together():
    before, metrics = validated(rows(3, 3, 1))
    assert before == {"valid_loss": 2}
    assert metrics["train"]["train_loss"] == 3
    assert metrics["train"]["valid_loss"] == 2


def test_data_smaller_than_a_batch_is_validated():
    assert validated(rows(1))[1]["train"]["valid_loss"] == 2


def test_empty_data_is_an_error():
    with pytest.raises(DataError, match="--valid_pattern contains no examples"):
        validated([])


def test_a_named_set_has_its_own_metrics_and_is_not_monitored():
    before, metrics = validated(rows(3), name="noisy", monitor_train=pytest.fail)
    assert before == {"valid_noisy_loss": 2}
    assert metrics["train"]["train_loss"] == 3
    assert "valid_loss" not in metrics["train"]
    with pytest.raises(DataError, match="the set noisy of --valid_sets contains no examples"):
        validated([], name="noisy")


def test_without_data_only_monitor_train_is_called():
    steps = []
    monitor = lambda config, state, metrics, writer: steps.append(int(state.step))
    before, metrics = validated((), monitor_train=monitor)
    assert before == {}
    assert "valid_loss" not in metrics["train"]
    assert steps == [0, 2]


def test_a_short_batch_that_the_model_rejects_is_skipped_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tekoa"):
        _, metrics = validated(rows(3, 3, 2), valid_step=full_only)
    assert metrics["train"]["valid_loss"] == 2
    assert "Skipping the last 2 validation examples" in caplog.text


def test_the_stop_flag_interrupts():
    with pytest.raises(InterruptedError):
        validated(rows(3), types.SimpleNamespace(is_set=lambda: True))


def test_scalars_have_a_group():
    groups = {"train": {"loss": 1.0}}
    writer = ScalarWriter(groups)
    writer.scalar("mine/a", np.float32(2), step=7)
    writer.add_scalar("b", jnp.ones(()))
    assert groups == {"train": {"loss": 1.0, "b": 1.0}, "mine": {"a": 2.0}}
