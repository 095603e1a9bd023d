"""Operations on bags, against the distribution that they must give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim import scale_bags, scale_values
from tekoa.optim.scale_values import Bag


def unit(seed=0):
    return scale_values.unit_bag(np.float32, np.random.default_rng(seed))


def apply(fn, shapes, data):
    """Runs the only operation of `fn`, traced on these shapes, on bags."""
    avals = [jax.ShapeDtypeStruct(shape, x.samples.dtype) for shape, x in zip(shapes, data)]
    eqn = jax.make_jaxpr(fn)(*avals).jaxpr.eqns[-1]
    data = [*data, *(v.val for v in eqn.invars[len(data) :])]
    return scale_bags.execute(eqn, data, np.random.default_rng(1))[0].samples


def test_entrywise_operation_is_applied_to_the_samples():
    bag = unit()
    out = apply(lambda x, y: x * y, [(9, 4), (9, 1)], [bag, bag])
    np.testing.assert_allclose(out, bag.samples**2, rtol=1e-6)


def test_sum_of_n_has_n_times_the_mean_and_variance():
    out = apply(lambda x: jnp.sum(x, 1), [(7, 400)], [Bag(unit().samples + 1)])
    assert out.mean() == pytest.approx(400, rel=0.02)
    assert out.std() == pytest.approx(20, rel=0.1)


def test_maximum_of_four_normals():
    out = apply(lambda x: jnp.max(x, 1), [(7, 4)], [unit()])
    assert out.mean() == pytest.approx(1.0294, rel=0.05)  # Known of four unit normals.


def test_variance_is_of_the_rows_that_its_mean_is_of():
    bag = unit()
    squares = apply(lambda x: jnp.sum(x, 1), [(7, 5)], [Bag(bag.samples**2)])
    sums = apply(lambda x: jnp.sum(x, 1), [(7, 5)], [bag])
    assert np.all(squares / 5 - (sums / 5) ** 2 > -1e-5)


def test_contraction_of_unit_data_grows_as_the_root_of_its_terms():
    out = apply(lambda x, y: x @ y, [(7, 64), (64, 5)], [unit(1), unit(2)])
    assert np.sqrt(np.mean(out**2)) == pytest.approx(8, rel=0.05)


def test_weighted_mean_keeps_the_scale():
    weights = Bag(np.full(scale_values.N_SAMPLES, 1 / 64, np.float32))
    out = apply(lambda x, y: x @ y, [(7, 64), (64, 5)], [weights, unit()])
    assert np.mean(out**2) == pytest.approx(1, rel=0.01)


def test_pooling_keeps_an_average_between_one_and_all_independent():
    def average(x):
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    out = apply(average, [(1, 8, 8, 3)], [unit()]) / 4
    assert 0.25 < np.mean(out**2) < 1


def test_slices_of_one_array_are_not_paired():
    bag = unit()
    halves = [apply(lambda x, i=i: x[:, i : i + 4], [(9, 8)], [bag]) for i in (0, 4)]
    assert abs(np.mean(halves[0] * halves[1])) < 0.1


def test_joined_arrays_are_mixed():
    zeros = Bag(np.zeros(scale_values.N_SAMPLES, np.float32))
    out = apply(lambda x, y: jnp.concatenate([x, y]), [(30,), (10,)], [zeros, unit()])
    assert np.mean(out**2) == pytest.approx(0.25, abs=0.05)
    out = apply(lambda x: jax.lax.pad(x, 0.0, [(0, 30, 0)]), [(10,)], [unit()])
    assert np.mean(out**2) == pytest.approx(0.25, abs=0.05)


def test_what_has_no_rule_is_of_unit_rms():
    out = apply(lambda x: jax.lax.cumprod(x, axis=1), [(8, 8)], [unit()])
    assert np.mean(out**2) == pytest.approx(1, rel=0.05)


def test_empty_row_of_a_masked_softmax_is_zero():
    zeros = Bag(np.zeros(scale_values.N_SAMPLES, np.float32))
    out = apply(lambda x, y: x / y, [(4,), (4,)], [zeros, zeros])
    assert not out.any()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.eye(4, dtype=np.float32), True),
        (np.zeros((3, 4), np.float32), False),
        (np.ones((3, 4), np.float32), False),
        (np.full((3, 4), 0.25, np.float32), False),
        (Bag(np.zeros(scale_values.N_SAMPLES, np.float32)), True),
        (Bag(np.ones(scale_values.N_SAMPLES, np.float32)), False),
    ],
)
def test_one_hot_rows_are_recognised(x, expected):
    assert scale_bags.is_one_hot(x, (1,), 4) is expected
