import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import objective
from tekoa.core.metrics import Mean

RNG = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
MASK = (np.arange(12) % 5 > 0).astype(np.float32)
PARAMS = {"w": np.float32([0.5, -1.0, 2.0])}


def linear(params, x):
    return x @ params["w"]


def row_mean(out, mask):
    del mask
    return jnp.mean(out**2)


def token_mean(out, mask):
    return Mean(jnp.sum(out**2 * mask), jnp.sum(mask))


def value_and_grad(loss, n_parts, **options):
    loss_of = objective.Objective(model_fns(PARAMS, linear), loss, **options)
    run = jax.jit(objective.make_value_and_grad(loss_of, n_parts))
    return run(PARAMS, {}, (X, MASK), RNG)


def test_every_microbatch_has_its_own_key():
    def noise(params, rng, x):
        return params["w"][0] * jax.random.normal(rng, x.shape[:1])

    loss_of = objective.Objective(model_fns(PARAMS, noise), row_mean)
    value, *_ = objective.make_value_and_grad(loss_of, 4)(PARAMS, {}, (X, MASK), RNG)
    draws = [jax.random.normal(jax.random.fold_in(RNG, i), (3,)) for i in range(4)]
    assert float(value) == pytest.approx(float(np.mean(np.square(0.5 * np.stack(draws)))))


@pytest.mark.parametrize(
    ("loss", "weights"),
    [(row_mean, np.full(12, 1 / 12)), (token_mean, MASK / MASK.sum())],
    ids=["mean over rows", "mean over tokens"],
)
@pytest.mark.parametrize("n_parts", [1, 3, 4])
def test_microbatches_add_up_to_numpys_result_of_the_full_batch(loss, weights, n_parts):
    out = X.astype(np.float64) @ PARAMS["w"]
    value, grads, _, _ = value_and_grad(loss, n_parts)
    assert float(value) == pytest.approx((out**2 * weights).sum(), rel=1e-6)
    np.testing.assert_allclose(grads["w"], 2 * (out * weights) @ X, rtol=1e-6)


def test_metrics_of_microbatches_add_up():
    def loss(out, mask):
        return jnp.mean(out**2), {"kept": jnp.mean(mask), "each": mask}

    *_, means = value_and_grad(loss, 3)
    computed = {name: float(mean.compute()) for name, mean in means.items()}
    value = np.mean((X @ PARAMS["w"]) ** 2)
    assert computed == pytest.approx({"kept": MASK.mean(), "each": MASK.mean(), "loss": value})


def test_make_value_computes_the_same_loss():
    loss_of = objective.Objective(model_fns(PARAMS, linear), token_mean)
    value, *_ = value_and_grad(token_mean, 3)
    alone = jax.jit(objective.make_value(loss_of, 3))(PARAMS, {}, (X, MASK), RNG)
    assert float(alone) == pytest.approx(float(value), rel=1e-6)


def test_without_a_loss_the_output_is_the_loss():
    fns = model_fns(PARAMS, lambda p, x: jnp.mean(linear(p, x)))
    loss_of = objective.Objective(fns, None)
    total, (count, _, means) = loss_of(PARAMS, {}, (X, ()), RNG)
    assert (float(total), float(count)) == (pytest.approx(np.mean(X @ PARAMS["w"])), 1)
    assert float(means["loss"].compute()) == pytest.approx(float(total))


def test_a_model_may_return_its_loss_with_metrics():
    fns = model_fns(PARAMS, lambda p, x: (jnp.mean(linear(p, x)), {"n": jnp.float32(2.0)}))
    _, (_, _, means) = objective.Objective(fns, None)(PARAMS, {}, (X, ()), RNG)
    assert float(means["n"].compute()) == 2.0


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda out, mask: out, r"float32 of shape \(12,\)"),
        (lambda out, mask: 1.0, "float"),
        (lambda out, mask: None, "NoneType"),
        (lambda out, mask: jnp.sum(mask).astype(jnp.int32), "int32"),
        (lambda out, mask: Mean(out, 1.0), r"shape \(12,\)"),
    ],
)
def test_a_loss_that_is_not_a_number_is_refused_with_its_type(loss, seen):
    with pytest.raises(TypeError, match=f"(?i)the loss .*{seen}"):
        value_and_grad(loss, 1)


def test_bf16_runs_the_model_in_bfloat16_and_the_loss_in_float32():
    seen = {}

    def apply(params, x, variables):
        seen.update(w=params["w"].dtype, x=x.dtype, n=variables["n"]["v"].dtype)
        return x @ params["w"], {"n": {"v": variables["n"]["v"] + 2**-10}}

    def loss(out, mask):
        seen["out"] = out.dtype
        return jnp.mean(out)

    fns = model_fns(lambda *_: (PARAMS, {}), apply)
    loss_of = objective.Objective(fns, loss, precision="bf16")
    variables = {"n": {"v": jnp.ones(())}}
    grads, (_, changed, _) = jax.grad(loss_of, has_aux=True)(PARAMS, variables, (X, MASK), RNG)
    assert seen == {"w": jnp.bfloat16, "x": jnp.bfloat16, "n": jnp.float32, "out": jnp.float32}
    assert grads["w"].dtype == jnp.float32
    # An update too small for bfloat16.
    assert float(changed["n"]["v"]) == 1 + 2**-10


def test_microbatches_use_the_carry_of_their_rows():
    def apply(params, x, variables):
        return x @ params["w"], {"carry": variables["carry"] + x[:, 0]}

    loss_of = objective.Objective(model_fns(lambda *_: None, apply), row_mean)
    carry = np.arange(12, dtype=np.float32)
    run = objective.make_value_and_grad(loss_of, 3)
    _, _, variables, _ = run(PARAMS, {"carry": jnp.array(carry)}, (X, MASK), RNG)
    np.testing.assert_allclose(variables["carry"], carry + X[:, 0], rtol=1e-6)
