import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa import data
from tekoa.estimator.cli import flags as flags_lib
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import experiment as experiment_lib
from tekoa.estimator.model_file.short import ShortProgram
from tekoa.estimator.run import run
from tekoa.hosts import signals
from tekoa.loop import train


def program(*flags, **functions):
    """A program for a model file with these functions."""

    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1),
            loss=lambda out, batch: ((out[:, 0] - batch["y"]) ** 2).mean(),
            optimizer=optax.sgd(0.1),
            inputs=lambda batch: batch["x"],
        )

    module = types.SimpleNamespace(__name__="my_model", **{"experiment": experiment, **functions})
    _, parsed = flags_lib.parse(list(flags))
    return ShortProgram(run.Run(config=parsed, module=module, settings=None, model_dir=None))


def open_numbers(settings, pattern, *, train):
    return data.as_source([{"x": np.float32([i]), "y": np.float32(i)} for i in range(10)])


def test_batches_report_the_first_of_a_consecutive_run():
    short = program(
        "--train_pattern=n", "--train_batch_size=2", "--train_consecutive=2", open_data=open_numbers
    )
    batches = short.train_batches(seed=0)
    first_four = [next(batches) for _ in range(4)]
    assert [batch["is_first"].tolist() for batch in first_four] == [[True] * 2, [False] * 2] * 2
    resumed = short.train_batches(seed=0)
    state = batches.state()
    expected = next(batches)
    resumed.restore(state)
    np.testing.assert_array_equal(next(resumed)["x"], expected["x"])


def test_missing_data_or_functions_are_named():
    with pytest.raises(UsageError, match="--eval_pattern"):
        program(open_data=open_numbers).evaluation()
    with pytest.raises(UsageError, match="no `metrics`"):
        program("--eval_pattern=n", open_data=open_numbers).evaluation()
    with pytest.raises(UsageError, match="no `predict`"):
        next(program("--pred_pattern=n", open_data=open_numbers).predictions("", None))


def counted_opens():
    """Returns an `open_data` that counts its calls, and the list of opened patterns."""
    patterns = []

    def open_data(settings, pattern, *, train):
        patterns.append(pattern)
        return open_numbers(settings, pattern, train=train)

    return open_data, patterns


def train_loop(short, **options):
    parts = short.train_parts(short.train_batches(seed=0), None)
    return train.TrainLoop(parts.model, parts.task, n_steps=5, steps_per_dispatch=1, **options)


def test_training_opens_its_data_once():
    open_data, patterns = counted_opens()
    short = program("--train_pattern=n", "--train_batch_size=2", open_data=open_data)
    list(train_loop(short, n_steps_per_checkpoint=5))
    short.sample("train")
    short.scales()
    assert patterns == ["n"]


def test_evaluating_another_checkpoint_opens_and_traces_nothing():
    open_data, patterns = counted_opens()
    traces = []

    def error(out, batch):
        traces.append(1)
        return out[:, 0] - batch["y"]

    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1),
            loss=error,
            optimizer=optax.sgd(0.1),
            inputs=lambda batch: batch["x"],
            metrics={"error": error},
        )

    flags = ["--eval_pattern=n", "--eval_batch_size=5"]
    evaluate = program(*flags, open_data=open_data, experiment=experiment).evaluation()
    stop_flag = signals.StopFlag()
    first, n_traces = evaluate(None, stop_flag), len(traces)
    assert evaluate(None, stop_flag) == first
    assert len(traces) == n_traces
    assert patterns == ["n"]


@pytest.mark.parametrize("with_metrics", [False, True])
def test_the_reported_loss_is_the_mean_since_the_previous_check(with_metrics):
    """Five batches of the numbers 0 to 9; the model outputs 0 and does not learn."""

    def loss(out, batch):
        value = ((out[:, 0] - batch["y"]) ** 2).mean()
        return (value, {"rows": jnp.float32([2.0, 2.0])}) if with_metrics else value

    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1, kernel_init=nn.initializers.zeros),
            loss=loss,
            optimizer=optax.sgd(0.0),
            inputs=lambda batch: batch["x"],
        )

    short = program(
        "--train_pattern=n", "--train_batch_size=2", open_data=open_numbers, experiment=experiment
    )
    metrics = train_loop(short, n_steps_per_checkpoint=5).next_checkpoint().metrics["train"]
    assert metrics["loss"] == pytest.approx(np.mean(np.arange(10.0) ** 2))
    assert ("rows" in metrics) == with_metrics
