"""Operations on samples give the expected distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales import values
from tekoa.optim.scales.rules import samples
from tekoa.optim.scales.values import Samples


def unit(seed=0):
    return values.unit_samples(np.float32, np.random.default_rng(seed))


def apply(fn, shapes, data):
    """Runs the only operation of `fn`, traced on these shapes, on samples."""
    avals = [jax.ShapeDtypeStruct(shape, x.samples.dtype) for shape, x in zip(shapes, data)]
    eqn = jax.make_jaxpr(fn)(*avals).jaxpr.eqns[-1]
    data = [*data, *(v.val for v in eqn.invars[len(data) :])]
    return samples.execute(eqn, data, np.random.default_rng(1))[0].samples


def test_elementwise_operation_is_applied_to_the_samples():
    x = unit()
    out = apply(lambda x, y: x * y, [(9, 4), (9, 1)], [x, x])
    np.testing.assert_allclose(out, x.samples**2, rtol=1e-6)


def test_sum_of_n_has_n_times_the_mean_and_variance():
    out = apply(lambda x: jnp.sum(x, 1), [(7, 400)], [Samples(unit().samples + 1)])
    assert out.mean() == pytest.approx(400, rel=0.02)
    assert out.std() == pytest.approx(20, rel=0.1)


def test_maximum_of_four_normals():
    out = apply(lambda x: jnp.max(x, 1), [(7, 4)], [unit()])
    assert out.mean() == pytest.approx(1.0294, rel=0.05)  # The known mean for four unit normals.


def test_mean_and_mean_square_use_the_same_draws():
    x = unit()
    squares = apply(lambda x: jnp.sum(x, 1), [(7, 5)], [Samples(x.samples**2)])
    sums = apply(lambda x: jnp.sum(x, 1), [(7, 5)], [x])
    assert np.all(squares / 5 - (sums / 5) ** 2 > -1e-5)


def test_contraction_of_unit_data_grows_as_the_root_of_its_terms():
    out = apply(lambda x, y: x @ y, [(7, 64), (64, 5)], [unit(1), unit(2)])
    assert np.sqrt(np.mean(out**2)) == pytest.approx(8, rel=0.05)


def test_weighted_mean_keeps_the_scale():
    weights = Samples(np.full(values.N_SAMPLES, 1 / 64, np.float32))
    out = apply(lambda x, y: x @ y, [(7, 64), (64, 5)], [weights, unit()])
    assert np.mean(out**2) == pytest.approx(1, rel=0.01)


def test_average_pooling_assumes_partly_independent_entries():
    def average(x):
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    out = apply(average, [(1, 8, 8, 3)], [unit()]) / 4
    assert 0.25 < np.mean(out**2) < 1


def test_slices_of_an_array_are_independent():
    x = unit()
    halves = [apply(lambda x, i=i: x[:, i : i + 4], [(9, 8)], [x]) for i in (0, 4)]
    assert abs(np.mean(halves[0] * halves[1])) < 0.1


def test_joined_arrays_are_mixed():
    zeros = Samples(np.zeros(values.N_SAMPLES, np.float32))
    out = apply(lambda x, y: jnp.concatenate([x, y]), [(30,), (10,)], [zeros, unit()])
    assert np.mean(out**2) == pytest.approx(0.25, abs=0.05)
    out = apply(lambda x: jax.lax.pad(x, 0.0, [(0, 30, 0)]), [(10,)], [unit()])
    assert np.mean(out**2) == pytest.approx(0.25, abs=0.05)


def test_operation_without_a_rule_gives_unit_rms():
    out = apply(lambda x: jax.lax.cumprod(x, axis=1), [(8, 8)], [unit()])
    assert np.mean(out**2) == pytest.approx(1, rel=0.05)


def test_empty_row_of_a_masked_softmax_is_zero():
    zeros = Samples(np.zeros(values.N_SAMPLES, np.float32))
    out = apply(lambda x, y: x / y, [(4,), (4,)], [zeros, zeros])
    assert not out.any()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.eye(4, dtype=np.float32), True),
        (np.zeros((3, 4), np.float32), False),
        (np.ones((3, 4), np.float32), False),
        (np.full((3, 4), 0.25, np.float32), False),
        (Samples(np.zeros(values.N_SAMPLES, np.float32)), True),
        (Samples(np.ones(values.N_SAMPLES, np.float32)), False),
    ],
)
def test_one_hot_rows_are_recognised(x, expected):
    assert samples.is_one_hot(x, (1,), 4) is expected
