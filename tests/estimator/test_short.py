import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa import data
from tekoa.estimator import config, module, run
from tekoa.estimator.config import UsageError
from tekoa.estimator.short import ShortProgram


def program(*flags, **functions):
    """A program around a model made here."""

    def experiment(settings, facts):
        return module.Experiment(
            model=nn.Dense(1),
            loss=lambda out, batch: ((out[:, 0] - batch["y"]) ** 2).mean(),
            optimizer=optax.sgd(0.1),
            inputs=lambda batch: batch["x"],
        )

    made = types.SimpleNamespace(__name__="made", **{"experiment": experiment, **functions})
    _, parsed = config.parse(list(flags))
    return ShortProgram(run.Run(config=parsed, module=made, settings=None, model_dir=None))


def open_numbers(settings, pattern, *, train):
    return data.as_source([{"x": np.float32([i]), "y": np.float32(i)} for i in range(10)])


def test_consecutive_batches_say_which_is_first():
    made = program(
        "--train_pattern=n", "--train_batch_size=2", "--train_consecutive=2", open_data=open_numbers
    )
    batches = made.train_batches(seed=0)
    drawn = [next(batches) for _ in range(4)]
    assert [batch["is_first"].tolist() for batch in drawn] == [[True] * 2, [False] * 2] * 2
    again = made.train_batches(seed=0)
    state = batches.state()
    expected = next(batches)
    again.restore(state)
    np.testing.assert_array_equal(next(again)["x"], expected["x"])


def test_what_a_mode_lacks_is_named():
    with pytest.raises(UsageError, match="--eval_pattern"):
        program(open_data=open_numbers).evaluation()
    with pytest.raises(UsageError, match="no metrics"):
        program("--eval_pattern=n", open_data=open_numbers).evaluation()
    with pytest.raises(UsageError, match="predict"):
        next(program("--pred_pattern=n", open_data=open_numbers).predictions("", None))


@pytest.mark.parametrize("with_metrics", [False, True])
def test_the_loss_told_is_the_mean_since_the_check_before(with_metrics):
    """Five batches of the numbers 0 to 9 against a model that gives 0 and does not learn."""

    def loss(out, batch):
        value = ((out[:, 0] - batch["y"]) ** 2).mean()
        return (value, {"rows": jnp.float32([2.0, 2.0])}) if with_metrics else value

    def experiment(settings, facts):
        return module.Experiment(
            model=nn.Dense(1, kernel_init=nn.initializers.zeros),
            loss=loss,
            optimizer=optax.sgd(0.0),
            inputs=lambda batch: batch["x"],
        )

    made = program(
        "--train_pattern=n", "--train_batch_size=2", open_data=open_numbers, experiment=experiment
    )
    loop = made.train_loop(
        lambda model, _: model,
        data=made.train_batches(seed=0),
        n_steps_per_checkpoint=5,
        n_steps=5,
        steps_per_dispatch=1,
    )
    told = loop.next_checkpoint().metrics["train"]
    assert told["loss"] == pytest.approx(np.mean(np.arange(10.0) ** 2))
    assert ("rows" in told) == with_metrics
