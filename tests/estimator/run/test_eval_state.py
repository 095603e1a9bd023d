import jax
import numpy as np
import pytest

from tekoa import data, store
from tekoa.bridges import any_model
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import eval_state
from tekoa.models import mnist
from tekoa.store import errors
from tekoa.store.transfer import copy


@pytest.fixture(scope="module")
def images():
    return (next(data.load("digits://split=test").batches(8))["image"],)


def test_parameters_of_a_step_are_loaded(trained, images):
    fns = any_model.as_model_fns(mnist.CNN(10, (0.0, 16.0)))
    checkpoint = eval_state.load_for_eval(trained / "checkpoint_20", fns, images)
    expected = store.load(trained, step=20)["model_params"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.eval_params, expected)
    assert checkpoint.step == 20


def test_t5x_steps_are_loaded(trained, images, tmp_path):
    copy.convert(trained, tmp_path, format="t5x")
    fns = any_model.as_model_fns(mnist.CNN(10, (0.0, 16.0)))
    path = eval_state.find_step(tmp_path, None)
    checkpoint = eval_state.load_for_eval(path, fns, images)
    expected = store.load(trained)["model_params"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.eval_params, expected)


def test_a_step_of_another_model_is_rejected_with_all_differences(trained, images):
    fns = any_model.as_model_fns(mnist.CNN(7, (0.0, 16.0)))
    with pytest.raises(errors.MismatchError) as error:
        eval_state.load_for_eval(trained / "checkpoint_20", fns, images)
    assert "Dense_1/bias" in str(error.value)
    assert "Dense_1/kernel" in str(error.value)


def test_the_requested_or_the_newest_step_is_used(trained, tmp_path):
    assert eval_state.find_step(trained, None).name == "checkpoint_25"
    requested = str(trained / "checkpoint_10")
    assert eval_state.find_step(tmp_path, requested).name == "checkpoint_10"
    assert eval_state.find_step(tmp_path, str(trained)).name == "checkpoint_25"
    with pytest.raises(UsageError, match="no checkpoint yet"):
        eval_state.find_step(tmp_path, None)
