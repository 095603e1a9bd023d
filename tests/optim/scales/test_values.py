"""Mean squares, and samples in place of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales import values
from tekoa.optim.scales.values import N_SAMPLES, Samples


def test_mean_square_ignores_nan_and_inf():
    assert values.mean_square(np.array([2.0, np.inf, np.nan, -2.0])) == 4.0
    assert values.mean_square(jnp.array([3.0, 4.0], jnp.bfloat16)) == 12.5
    assert values.mean_square(np.array([3 + 4j])) == pytest.approx(25.0)
    assert values.mean_square(np.zeros((0,))) == 0.0


def test_mean_square_by_row():
    rows = values.mean_square(np.array([[3.0, 4.0], [0.0, 0.0]]), (1,))
    np.testing.assert_allclose(rows, [[12.5], [0.0]])


def test_unit_samples_are_a_unit_normal():
    samples = values.unit_samples(np.float32, np.random.default_rng(0)).samples
    assert np.mean(samples**2) == pytest.approx(1.0, rel=1e-5)
    assert np.mean(samples) == pytest.approx(0.0, abs=1e-5)
    assert np.mean(samples**4) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, jax.random.key(0).dtype])
def test_unit_samples_of_other_dtypes_are_zeros_and_ones(dtype):
    samples = values.unit_samples(dtype, np.random.default_rng(0)).samples
    assert set(np.unique(samples)) == {0, 1}


@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_samples_of_an_array_have_its_moments(size):
    array = np.random.default_rng(0).random(size)
    samples = values.as_samples(array)
    assert samples.shape == (N_SAMPLES,)
    assert samples.mean() == pytest.approx(array.mean(), abs=0.02)


def test_arrays_of_the_same_size_are_sampled_at_the_same_positions():
    x = np.random.default_rng(0).random(9999)
    np.testing.assert_array_equal(values.as_samples(x**2), values.as_samples(x) ** 2)


def test_mixture_is_weighted_by_size():
    data_and_sizes = [(np.zeros(30), 30), (Samples(np.ones(N_SAMPLES)), 10)]
    mixture = values.mix(data_and_sizes, np.random.default_rng(0))
    assert mixture.samples.mean() == pytest.approx(0.25, abs=0.01)


def test_dependency_bits_of_batch_and_parameters_differ():
    bits = [values.BATCH, *(values.param_bit(i) for i in range(70))]
    assert len(set(bits)) == 71
    value = values.Value(shape=(), dtype=np.float32, deps=bits[0] | bits[3])
    assert value.from_batch
    assert value.from_params
