"""Every checkpoint carries the metrics of training, and the rates that the optimizer reports."""

import optax

import tekoa


def test_a_checkpoint_has_metrics_of_training_and_rates_by_group(line):
    optimizer = tekoa.param_groups({".*": 0.1}, make=optax.sgd)
    task = tekoa.TrainTask(apply=line.apply, optimizer=optimizer, loss=line.mse, data=line.data(4))
    loop = tekoa.TrainLoop(model=line.params, task=task, n_steps_per_checkpoint=2, n_steps=2)
    metrics = loop.next_checkpoint().metrics
    assert {"loss", "gradients_l2norm", "weights_l2norm"} <= metrics["train"].keys()
    assert list(metrics["rates"].values()) == [optax.tree.norm({"rate": 0.1}).item()]
