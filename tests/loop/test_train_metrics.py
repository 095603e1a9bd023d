"""Every checkpoint carries the metrics of training, and the rates that the optimizer reports."""

import optax
import pytest

import tekoa


def test_a_checkpoint_has_metrics_of_training_and_rates_by_group(line):
    optimizer = tekoa.param_groups({".*": 0.1}, make=optax.sgd)
    task = tekoa.TrainTask(apply=line.apply, optimizer=optimizer, loss=line.mse, data=line.data(4))
    loop = tekoa.TrainLoop(model=line.params, task=task, n_steps_per_checkpoint=2, n_steps=2)
    metrics = loop.next_checkpoint().metrics
    assert {"loss", "gradients_l2norm", "weights_l2norm"} <= metrics["train"].keys()
    assert list(metrics["rates"].values()) == [optax.tree.norm({"rate": 0.1}).item()]


def test_the_rate_of_an_optimizer_by_name_is_known(line):
    def rates(name):
        task = tekoa.TrainTask(apply=line.apply, optimizer=name, loss=line.mse, data=line.data(4))
        loop = tekoa.TrainLoop(model=line.params, task=task, n_steps_per_checkpoint=1, n_steps=4)
        return [checkpoint.scalars["rates/all"] for checkpoint in loop]

    assert rates("adamw") == [5e-4] * 4
    # A quarter of the steps rises to c / sqrt(4), the rest falls: `docs/optimizers.md`.
    sizes = rates("auto")
    assert sizes[0] == max(sizes) > sizes[1] > sizes[2] > sizes[3]
    assert sizes[0] == pytest.approx(0.5 / 4**0.5)


def test_scalars_are_all_metrics_by_group_and_name(line):
    checkpoint = next(line.loop(n_steps_per_checkpoint=2))
    checkpoint = checkpoint.with_metrics("eval", {"accuracy": 0.5})
    assert checkpoint.scalars["eval/accuracy"] == 0.5
    assert checkpoint.scalars["train/loss"] == checkpoint.metrics["train"]["loss"]
    assert all(type(value) is float for value in checkpoint.scalars.values())
