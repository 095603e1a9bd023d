import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.core import metrics
from tekoa.core.metrics import Mean


def test_a_scalar_is_weighted_by_rows_and_a_vector_by_its_length():
    a = metrics.as_mean(jnp.float32(3.0), 2, "a")
    b = metrics.as_mean(jnp.float32([1.0, 2.0, 3.0, 4.0]), 4, "b")
    assert float(a.merge(b).compute()) == pytest.approx((3 + 3 + 1 + 2 + 3 + 4) / 6)


def test_merged_batches_of_different_sizes_have_numpys_mean():
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    sums = metrics.zeros({"v": None})
    for start in range(0, 1001, 64):
        part = values[start : start + 64]
        sums = metrics.merge(sums, {"v": metrics.as_mean(jnp.mean(part), len(part), "v")})
    assert metrics.compute(sums)["v"] == pytest.approx(values.astype(np.float64).mean(), rel=1e-5)


def test_low_precision_values_are_summed_in_float32():
    mean = metrics.as_mean(jnp.ones(300, jnp.bfloat16), 300, "m")
    assert (mean.total.dtype, float(mean.total)) == (jnp.float32, 300.0)


@pytest.mark.parametrize("value", [True, 2, jnp.array([True, False])])
def test_booleans_and_integers_are_numbers(value):
    assert metrics.as_mean(value, 2, "m").total.dtype == jnp.float32


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("text", "got str"),
        (None, "got NoneType"),
        (jnp.zeros((2, 3)), r"got an array of shape \(2, 3\)"),
        (Mean(jnp.zeros(2), 1.0), r"shape \(2,\)"),
    ],
)
def test_a_value_that_is_not_a_number_is_refused_by_name(value, seen):
    with pytest.raises(TypeError, match=f"Metric 'm' .*{seen}"):
        metrics.as_mean(value, 2, "Metric 'm'")


def test_an_empty_mean_is_nan():
    assert math.isnan(metrics.compute(metrics.zeros({"a": 0}))["a"])


def test_means_pass_through_jit():
    doubled = jax.jit(lambda m: m.merge(m))(Mean(jnp.float32(1.0), jnp.float32(2.0)))
    assert isinstance(doubled, Mean)
    assert float(doubled.compute()) == 0.5


def test_totals_add_up_and_are_finished_on_the_host():
    def ratio(a, b):
        assert isinstance(a, np.ndarray | np.generic)
        return a / b

    add = jax.jit(lambda x, y: metrics.merge({"r": x}, {"r": y})["r"])
    values = [metrics.Totals({"a": jnp.float32(i), "b": jnp.float32(2)}, ratio) for i in (1, 5)]
    assert metrics.compute({"r": add(*values)}) == {"r": 1.5}
    empty = metrics.zeros_like(jax.eval_shape(lambda: {"r": values[0]}))
    assert metrics.compute(metrics.merge(empty, {"r": values[1]})) == {"r": 2.5}
