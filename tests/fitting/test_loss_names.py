import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import metrics as sk

from tekoa.fitting import loss_names


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def value(name, outputs, targets):
    return float(loss_names.find_loss(name)(jnp.asarray(outputs), jnp.asarray(targets)).compute())


def test_cross_entropy_is_that_of_scikit_learn():
    logits, labels = numbers(20, 4), np.arange(20) % 4
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = sk.log_loss(labels, probabilities)
    assert value("cross_entropy", logits, labels) == pytest.approx(expected, rel=1e-5)
    assert value("cross_entropy", logits, labels[:, None]) == pytest.approx(expected, rel=1e-5)
    one_hot = np.eye(4, dtype=np.float32)[labels]
    assert value("cross_entropy", logits, one_hot) == pytest.approx(expected, rel=1e-5)


def test_negative_labels_are_ignored():
    logits, labels = numbers(3, 5, 4), np.full((3, 5), -1)
    labels[1, 2] = 3
    expected = optax.softmax_cross_entropy_with_integer_labels(logits[1, 2], labels[1, 2])
    assert value("cross_entropy", logits, labels) == pytest.approx(float(expected), rel=1e-6)


def test_errors_are_those_of_scikit_learn():
    outputs, targets = numbers(30), numbers(30, seed=1)
    expected = sk.mean_squared_error(targets, outputs)
    assert value("mse", outputs, targets) == pytest.approx(expected, rel=1e-5)
    expected = sk.mean_absolute_error(targets, outputs)
    assert value("mae", outputs, targets) == pytest.approx(expected, rel=1e-5)


def test_binary_cross_entropy_is_that_of_scikit_learn():
    logits, targets = numbers(30), np.arange(30) % 2
    expected = sk.log_loss(targets, 1 / (1 + np.exp(-logits)))
    assert value("bce", logits, targets) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "bce"])
def test_a_column_and_a_vector_do_not_broadcast_to_a_matrix(name):
    outputs, targets = numbers(6), numbers(6, seed=1)
    flat = value(name, outputs, targets)
    assert value(name, outputs[:, None], targets) == flat
    assert value(name, outputs, targets[:, None]) == flat
    with pytest.raises(ValueError, match=r"same shape, got \(6,\) and \(5,\)"):
        value(name, outputs, targets[:5])


def test_class_numbers_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"which is \(6,\), but the targets have shape \(5,\)"):
        value("cross_entropy", numbers(6, 3), np.zeros(5, np.int32))


def test_an_unknown_name_is_refused_with_a_guess():
    with pytest.raises(ValueError, match=r"no loss 'crossentropy'. Did you mean 'cross_entropy'"):
        loss_names.find_loss("crossentropy")
    with pytest.raises(TypeError, match="a name or a function, got int"):
        loss_names.find_loss(3)
