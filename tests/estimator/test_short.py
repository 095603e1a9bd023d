import types

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

    made = types.SimpleNamespace(__name__="made", experiment=experiment, **functions)
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
