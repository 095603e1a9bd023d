"""Unsuitable models, parameters and batches are refused with a clear message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales import trace
from tekoa.optim.scales.auto import scales_of_function

PARAMS = {"w": jnp.zeros((4, 2))}


def linear(params, x):
    return x @ params["w"]


def test_batch_of_wrong_shape_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"cannot be traced on a batch of .*float32\[3,5\].*"):
        scales_of_function(linear, PARAMS, jnp.ones((3, 5)))


def test_predictions_instead_of_logits_are_not_differentiable():
    with pytest.raises(ValueError, match=r"not differentiable: its outputs are \['int32'\]"):
        scales_of_function(lambda p, x: linear(p, x).argmax(-1), PARAMS, jnp.ones((3, 4)))


def test_operation_without_gradient_is_refused():
    def model(params, x):
        return jax.lax.while_loop(
            lambda c: c[1] < x.sum(),
            lambda c: (c[0] @ params["w"] @ params["w"].T, c[1] + 1),
            (x, 0.0),
        )[0]

    with pytest.raises(ValueError, match="not differentiable with respect to its parameters"):
        scales_of_function(model, PARAMS, jnp.ones((3, 4)))


def test_leaf_that_is_not_an_array_is_named():
    with pytest.raises(TypeError, match=r"'layer/act' is a .*, not an array.*tekoa.find_scales"):
        scales_of_function(linear, {"layer": {"act": abs}}, jnp.ones((3, 4)))


def test_no_parameters_is_an_error():
    with pytest.raises(ValueError, match="no parameters"):
        scales_of_function(linear, {}, jnp.ones((3, 4)))


def test_static_arguments_are_separated_from_arrays():
    batch = ({"x": np.ones(3), "train": True}, 0.5, None, "name")
    arrays, merge = trace.split_static(batch)
    assert [array.shape for array in arrays] == [(3,)]
    assert merge([7]) == ({"x": 7, "train": True}, 0.5, None, "name")


def test_python_numbers_are_parameters_too():
    (leaf,) = trace.check_leaves({"gain": 2.0})
    assert leaf.shape == ()
