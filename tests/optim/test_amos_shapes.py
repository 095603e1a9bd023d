import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim import amos_shapes

NAME, SHAPE = ("dense", "kernel"), (4, 3)


@pytest.mark.parametrize("eta", [0.0, 2, np.ones(3), jnp.ones((4, 1))])
def test_scales_broadcast_to_the_parameter(eta):
    seen = amos_shapes.eta_of(lambda name, shape: eta, NAME, SHAPE)
    assert isinstance(seen, np.ndarray)
    np.testing.assert_array_equal(seen, eta)


@pytest.mark.parametrize("eta", [-1.0, np.nan, np.inf, np.ones(4), np.ones((1, 4, 3))])
def test_a_wrong_scale_names_its_parameter(eta):
    with pytest.raises(ValueError, match="'dense/kernel'"):
        amos_shapes.eta_of(lambda name, shape: eta, NAME, SHAPE)


@pytest.mark.parametrize("shape", [(), (3,), [4, 1], (1, 1), (4, 3)])
def test_slots_may_have_every_shape_that_broadcasts(shape):
    assert amos_shapes.slot_shape_of(lambda name, _: shape, NAME, SHAPE) == tuple(shape)
    assert amos_shapes.slot_shape_of(None, NAME, SHAPE) == SHAPE


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 4, 3), 1, None])
def test_a_wrong_slot_shape_names_its_parameter(shape):
    with pytest.raises(ValueError, match="'dense/kernel'"):
        amos_shapes.slot_shape_of(lambda name, _: shape, NAME, SHAPE)
