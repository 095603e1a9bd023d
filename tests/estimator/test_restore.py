import jax
import numpy as np
import pytest

from tekoa import data, store
from tekoa.bridges import detect
from tekoa.estimator import restore
from tekoa.estimator.config import UsageError
from tekoa.models import mnist
from tekoa.store import converting, errors


@pytest.fixture(scope="module")
def images():
    return (next(data.load("digits://split=test").batches(8))["image"],)


def test_parameters_of_a_step_come_back(trained, images):
    fns = detect.as_model_fns(mnist.CNN(10, (0.0, 16.0)))
    checkpoint = restore.for_evaluation(trained / "checkpoint_20", fns, images)
    expected = store.load(trained, step=20)["model_params"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.eval_params, expected)
    assert checkpoint.step == 20


def test_t5x_steps_are_read_too(trained, images, tmp_path):
    converting.convert(trained, tmp_path, layout="t5x")
    fns = detect.as_model_fns(mnist.CNN(10, (0.0, 16.0)))
    path = restore.find_step(tmp_path, None)
    checkpoint = restore.for_evaluation(path, fns, images)
    expected = store.load(trained)["model_params"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.eval_params, expected)


def test_another_model_is_refused_with_all_differences(trained, images):
    fns = detect.as_model_fns(mnist.CNN(7, (0.0, 16.0)))
    with pytest.raises(errors.MismatchError) as error:
        restore.for_evaluation(trained / "checkpoint_20", fns, images)
    assert "Dense_1/bias" in str(error.value)
    assert "Dense_1/kernel" in str(error.value)


def test_the_step_is_the_one_given_or_the_newest(trained, tmp_path):
    assert restore.find_step(trained, None).name == "checkpoint_25"
    given = str(trained / "checkpoint_10")
    assert restore.find_step(tmp_path, given).name == "checkpoint_10"
    assert restore.find_step(tmp_path, str(trained)).name == "checkpoint_25"
    with pytest.raises(UsageError, match="no checkpoint yet"):
        restore.find_step(tmp_path, None)
