import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.example_libraries import optimizers as original

from tekoa.optim.triples import schedules

CASES = {
    "constant": (0.3,),
    "exponential_decay": (0.3, 7, 0.9),
    "inverse_time_decay": (0.3, 7, 0.9),
    "inverse_time_decay_staircase": (0.3, 7, 0.9, True),
    "polynomial_decay": (0.3, 7, 0.05),
    "polynomial_decay_cubed": (0.3, 7, 0.05, 3.0),
    "piecewise_constant": ([3, 8], [0.3, 0.2, 0.1]),
}


def both(case):
    name = case.removesuffix("_staircase").removesuffix("_cubed")
    return [getattr(module, name)(*CASES[case]) for module in (schedules, original)]


@pytest.mark.parametrize("case", CASES)
def test_schedule_matches_the_original_bit_for_bit(case):
    ours, theirs = both(case)
    ours_jit, theirs_jit = jax.jit(ours), jax.jit(theirs)
    for i in [0, 1, 3, 4, 7, 8, 9, 50]:
        np.testing.assert_array_equal(np.asarray(ours(i)), np.asarray(theirs(i)))
        np.testing.assert_array_equal(np.asarray(ours_jit(i)), np.asarray(theirs_jit(i)))


@pytest.mark.parametrize(
    ("case", "i", "expected"),
    [
        ("constant", 5, 0.3),
        ("exponential_decay", 14, 0.3 * 0.81),
        ("inverse_time_decay", 14, 0.3 / 2.8),
        ("inverse_time_decay_staircase", 13, 0.3 / 1.9),
        ("polynomial_decay", 7, 0.05),
        ("polynomial_decay", 99, 0.05),
        ("polynomial_decay_cubed", 0, 0.3),
        ("piecewise_constant", 3, 0.3),
        ("piecewise_constant", 4, 0.2),
        ("piecewise_constant", 9, 0.1),
    ],
)
def test_schedule_matches_its_formula(case, i, expected):
    np.testing.assert_allclose(both(case)[0](i), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("boundaries", "values", "words"),
    [
        ([1, 2], [0.1, 0.2], ["2 values", "2 boundaries"]),
        ([1], [0.1, 0.2, 0.3], ["3 values", "1 boundaries"]),
        ([[1]], [0.1, 0.2], ["one-dimensional", "(1, 1)"]),
        (1, [0.1, 0.2], ["one-dimensional", "()"]),
        ([1], 0.1, ["one-dimensional", "()"]),
    ],
)
def test_boundaries_and_values_that_do_not_match_are_refused(boundaries, values, words):
    with pytest.raises(ValueError, match="values") as error:
        schedules.piecewise_constant(boundaries, values)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.array(0.5), jnp.array(0.5)])
def test_a_number_is_a_constant_schedule(value):
    assert schedules.make_schedule(value)(100) is value


def test_a_schedule_is_returned_unchanged():
    schedule = schedules.constant(1.0)
    assert schedules.make_schedule(schedule) is schedule


@pytest.mark.parametrize("value", [None, "0.1", [0.1], np.ones(1), jnp.ones((1, 1)), {}])
def test_invalid_step_sizes_are_refused(value):
    with pytest.raises(TypeError, match="step size"):
        schedules.make_schedule(value)


def test_traced_step_size_is_accepted():
    np.testing.assert_allclose(jax.jit(lambda s: schedules.make_schedule(s)(3) * 2)(0.5), 1.0)
