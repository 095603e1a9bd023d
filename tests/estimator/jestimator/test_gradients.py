import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.jestimator.gradients import Gradients, LossRecord

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
PARAMS = {"w": jnp.arange(3.0)}
SCALES = {
    "mean": lambda n: 1 / n,
    "sum": lambda n: 1.0,
    "sum over sqrt(rows)": lambda n: 1 / np.sqrt(n),
    "sum over rows squared": lambda n: 1 / n**2,
}


def compute(kind="mean", *, n_parts, variables=None, is_lowered=False):
    """The loss, its results, the variables and the gradients of one batch."""

    def loss(params, variables, inputs, i):
        (x,), options = inputs
        assert options["method"] is len  # A setting that is no array.
        errors = options["factor"] * (x @ params["w"]) ** 2
        changed = {name: tree + x[:, :1] for name, tree in variables.items() if name == "memory"}
        changed |= {n: tree + x.mean() for n, tree in variables.items() if n == "average"}
        n_rows = x.shape[0]
        scale = SCALES[kind](n_rows)
        return errors.sum() * scale, ((jnp.float32(n_rows), errors), changed)

    record = Gradients(8, n_parts, is_lowered=is_lowered)

    @jax.jit
    def run(params, variables, x):
        inputs = ((x,), {"method": len, "factor": jnp.float32(0.5)})
        return record.compute(loss, params, variables, inputs, keeps_variables=False)

    return run(PARAMS, variables or {}, X), record


@pytest.mark.parametrize("kind", ["mean", "sum", "sum over sqrt(rows)"])
def test_parts_of_a_batch_combine_to_the_batch(kind):
    whole, _ = compute(kind, n_parts=1)
    parts, _ = compute(kind, n_parts=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, parts)
    expected = 0.5 * ((X @ np.arange(3.0)) ** 2).sum() * SCALES[kind](8)
    np.testing.assert_allclose(parts[0][0], expected, rtol=1e-5)


def test_a_loss_of_another_kind_is_refused():
    with pytest.raises(UsageError, match="neither a mean nor a sum over rows"):
        compute("sum over rows squared", n_parts=4)


def test_rows_of_a_memory_are_split_and_running_averages_are_not():
    variables = {"memory": jnp.arange(8.0)[:, None], "average": jnp.zeros(8)}
    (whole, _), _ = compute(n_parts=1, variables={"memory": variables["memory"]})
    (parts, _), _ = compute(n_parts=4, variables={"memory": variables["memory"]})
    np.testing.assert_allclose(parts[1][1]["memory"], whole[1][1]["memory"], rtol=1e-6)
    # An average of as many entries as there are rows is updated by one part after another.
    (parts, _), _ = compute(n_parts=4, variables={"average": variables["average"]})
    np.testing.assert_allclose(parts[1][1]["average"], np.full(8, 4 * X.mean()), rtol=1e-5)


def test_lower_precision_returns_float32():
    (exact, exact_grads), _ = compute(n_parts=1)
    (loss, grads), record = compute(n_parts=1, is_lowered=True)
    assert loss[0].dtype == grads["w"].dtype == jnp.float32
    assert float(loss[0]) != float(exact[0])
    np.testing.assert_allclose(loss[0], exact[0], rtol=0.03)
    np.testing.assert_allclose(grads["w"], exact_grads["w"], rtol=0.05, atol=0.05)
    assert record.value_fn is not None


def test_the_record_of_a_loss_hides_its_parameters_from_the_step():
    def fn(params, variables, inputs, i):
        return params * inputs, ((len(inputs), params + 1), variables)

    record = LossRecord(jnp.float32(3.0))
    (loss, ((n_rows, result), variables)), grads = record.compute(
        fn, jnp.float32(5.0), {"v": jnp.ones(2)}, jnp.ones(4), keeps_variables=False
    )
    np.testing.assert_array_equal(record.losses, [3 * np.ones(4)])
    assert n_rows == 4
    for zeros in (loss, result, variables["v"], grads):
        assert not np.any(zeros)
