import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tekoa.core.loss.cross_entropy import cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 3, 5)).astype(np.float32) * 3
LABELS = RNG.integers(0, 5, (2, 3))
ONE_HOT = np.eye(5)[LABELS]


@pytest.mark.parametrize("labels", [LABELS, ONE_HOT.astype(np.float32)])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0, 0), (0.1, 0), (0, 1e-2), (0.3, 1e-3)])
def test_values_equal_numpy(labels, smoothing, z_loss):
    wide = LOGITS.astype(np.float64)
    smoothed = (1 - smoothing) * ONE_HOT + smoothing / 5
    expected = -(smoothed * special.log_softmax(wide, axis=-1)).sum(-1)
    expected += z_loss * special.logsumexp(wide, axis=-1) ** 2
    values = cross_entropy(jnp.asarray(LOGITS), labels, label_smoothing=smoothing, z_loss=z_loss)
    np.testing.assert_allclose(values, expected, rtol=2e-5)


def test_the_value_of_16_bit_logits_is_float32():
    values = cross_entropy(jnp.asarray(LOGITS, jnp.bfloat16), LABELS, label_smoothing=0.1)
    assert values.dtype == jnp.float32


@pytest.mark.parametrize("options", [{"label_smoothing": 1.0}, {"z_loss": -1.0}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        cross_entropy(jnp.asarray(LOGITS), LABELS, **options)
