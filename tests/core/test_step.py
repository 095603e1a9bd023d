import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.core.metrics import Mean
from tekoa.core.model import ModelFns
from tekoa.testing import assert_trees_equal, count_compilations

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = RNG.normal(size=12).astype(np.float32)
PARAMS = {"w": np.float32([0.5, -1.0, 2.0]), "b": np.float32(0.1)}
FNS = model_fns(PARAMS, lambda p, x: x @ p["w"] + p["b"])


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def start(tx, fns=FNS, **options):
    return steps.init_state(fns, tx, jax.random.key(0), inputs=(X,), **options)


def train(tx, n, fns=FNS, loss=mse, ema=None, **options):
    state = start(tx, fns, ema=ema)
    step = jax.jit(steps.make_train_step(fns, loss, tx, ema=ema, **options))
    outputs = []
    for _ in range(n):
        state, output = step(state, (X, Y))
        outputs.append(output)
    return state, outputs


def test_one_step_of_gradient_descent_equals_numpy():
    state, (output,) = train(optax.sgd(0.1), 1)
    error = X.astype(np.float64) @ PARAMS["w"] + PARAMS["b"] - Y
    grad = 2 * error @ X / 12
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - 0.1 * grad, rtol=1e-6)
    assert float(output.loss) == pytest.approx((error**2).mean(), rel=1e-6)
    norm = np.sqrt((grad**2).sum() + (2 * error.mean()) ** 2)
    assert float(output.gradients_l2norm) == pytest.approx(norm, rel=1e-6)
    assert float(output.weights_l2norm) == pytest.approx(
        np.sqrt(sum(np.square(np.float64(p)).sum() for p in state.params.values())), rel=1e-6
    )
    assert (int(state.step), output.grads) == (1, None)


def test_returned_gradients_are_those_passed_to_the_optimizer():
    _, (output,) = train(optax.sgd(0.1), 1, keep_grads=True)
    state, _ = train(optax.sgd(0.1), 1)
    np.testing.assert_allclose(
        output.grads["w"], (PARAMS["w"] - np.asarray(state.params["w"])) / 0.1, rtol=1e-4
    )


@pytest.mark.parametrize("loss", [mse, lambda o, y: Mean(jnp.sum((o - y) ** 2 * (y > 0)), 6.0)])
def test_accumulation_equals_the_full_batch(loss):
    whole, _ = train(optax.adam(0.1), 5, loss=loss, ema=0.9)
    parts, _ = train(optax.adam(0.1), 5, loss=loss, ema=0.9, accumulate=4)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert int(parts.step) == 5


def test_the_average_is_updated_once_per_step_under_accumulation():
    state, _ = train(optax.sgd(0.1), 1, ema=0.75, accumulate=4)
    for name, first in PARAMS.items():
        expected = 0.75 * first + 0.25 * np.asarray(state.params[name])
        np.testing.assert_allclose(state.average[name], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "tx", [optax.adam(1e-2), optax.lbfgs(), optax.polyak_sgd()], ids=["adam", "lbfgs", "polyak"]
)
def test_a_step_compiles_once(tx):
    state, batch = start(tx), (X, Y)
    step = jax.jit(steps.make_train_step(FNS, mse, tx), donate_argnums=0)
    with count_compilations() as compiled:
        for _ in range(3):
            state, _ = step(state, batch)
    assert compiled.total == 1


def test_lbfgs_gets_the_arguments_it_needs():
    _, outputs = train(optax.lbfgs(), 12)
    best = np.linalg.lstsq(np.c_[X, np.ones(12)], Y, rcond=None)[1][0] / 12
    assert float(outputs[-1].loss) == pytest.approx(best, rel=1e-4)


def test_lbfgs_works_under_accumulation():
    _, whole = train(optax.lbfgs(), 4)
    _, parts = train(optax.lbfgs(), 4, accumulate=3)
    assert float(parts[-1].loss) == pytest.approx(float(whole[-1].loss), rel=1e-3)


def test_weakly_typed_parameters_become_strong():
    fns = model_fns({"w": 1.0, "b": jnp.full((), 2.0)}, lambda p, x: x[:, 0] * p["w"] + p["b"])
    state = start(optax.sgd(0.1), fns)
    assert not any(x.weak_type for x in jax.tree.leaves(state) if hasattr(x, "weak_type"))


def test_every_step_has_its_own_key_derived_from_the_root():
    fns = model_fns(PARAMS, lambda p, x, rng: jnp.sum(p["w"]) * 0 + jax.random.normal(rng))
    state, outputs = train(optax.sgd(0.1), 3, fns, loss=None)
    root = jax.random.split(jax.random.key(0))[1]
    expected = [float(jax.random.normal(jax.random.fold_in(root, i))) for i in range(3)]
    assert [float(o.loss) for o in outputs] == pytest.approx(expected)
    assert bool((state.rng == root).all())


def test_bf16_keeps_parameters_and_slots_in_float32():
    state, outputs = train(optax.adam(0.1), 2, precision="bf16")
    _, exact = train(optax.adam(0.1), 2)
    dtypes = {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))}
    assert dtypes == {jnp.dtype("float32")}
    assert float(outputs[1].loss) == pytest.approx(float(exact[1].loss), rel=2e-2)
    assert float(outputs[1].loss) != float(exact[1].loss)


def test_metrics_of_a_loss_are_summed_over_steps():
    state = start(optax.sgd(0.0), metric_names=("positive",))
    step = steps.make_train_step(FNS, lambda o, y: (mse(o, y), {"positive": y > 0}), optax.sgd(0.0))
    for y in (Y, -np.abs(Y)):
        state, _ = step(state, (X, y))
    assert float(state.sums["positive"].compute()) == pytest.approx((Y > 0).mean() / 2)


def test_metrics_missing_in_the_state_are_named():
    step = steps.make_train_step(FNS, lambda o, y: (mse(o, y), {"m": y}), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"returned the metrics \['m'\], .* created for \[\]"):
        step(start(optax.sgd(0.1)), (X, Y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate must be 1 or more"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\)"),
        ({"on_nan": "explode"}, "on_nan must be one of .*'explode'"),
        ({"precision": "fp4"}, "precision must be one of .*'fp4'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        steps.make_train_step(FNS, mse, optax.sgd(0.1), **options)


def test_a_missing_average_raises():
    step = steps.make_train_step(FNS, mse, optax.sgd(0.1), ema=0.9)
    with pytest.raises(ValueError, match=r"init_state\(..., ema="):
        step(start(optax.sgd(0.1)), (X, Y))


def test_integer_parameters_are_refused():
    with pytest.raises(TypeError, match="Parameter 'n' has dtype int32"):
        start(optax.sgd(0.1), model_fns({"n": np.int32(3)}, lambda p, x: x))


def test_the_step_runs_any_model_fns():
    fns = ModelFns(
        init=lambda rng, inputs: ({"w": jnp.ones(3)}, {"seen": {"n": jnp.zeros((), jnp.int32)}}),
        apply=lambda p, v, inputs, rng, train: (
            inputs[0] @ p["w"],
            {"seen": {"n": v["seen"]["n"] + 1}} if train else {},
        ),
    )
    state, _ = train(optax.sgd(0.1), 3, fns)
    assert int(state.variables["seen"]["n"]) == 3


def test_evaluation_returns_means_and_unchanged_variables():
    step = steps.make_eval_step(FNS, {"mse": mse, "each": lambda o, y: (o - y) ** 2})
    means, variables = jax.jit(step)(PARAMS, {}, (X, Y), jax.random.key(0))
    expected = ((X @ PARAMS["w"] + PARAMS["b"] - Y) ** 2).mean()
    assert float(means["mse"].compute()) == pytest.approx(expected, rel=1e-6)
    assert float(means["each"].compute()) == pytest.approx(expected, rel=1e-6)
    assert variables == {}


def test_prediction_returns_outputs():
    outputs, _ = steps.make_predict_step(FNS)(PARAMS, {}, (X, ()), jax.random.key(0))
    np.testing.assert_allclose(outputs, X @ PARAMS["w"] + PARAMS["b"], rtol=1e-6)


def test_a_state_created_twice_is_the_same():
    assert_trees_equal(start(optax.adam(0.1)), start(optax.adam(0.1)))


def test_a_scan_of_steps_computes_what_single_steps_compute():
    tx = optax.adam(0.1)
    expected, outputs = train(tx, 3)
    batches = np.stack([X] * 3), np.stack([Y] * 3)
    many_steps = jax.jit(steps.scan_steps(steps.make_train_step(FNS, mse, tx)))
    state, output = many_steps(start(tx), batches)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert (int(state.step), output.gradients_l2norm) == (3, None)
    assert float(output.loss) == pytest.approx(float(outputs[-1].loss), rel=1e-6)


@pytest.mark.parametrize("remat", ["everything", "dots", jax.checkpoint_policies.dots_saveable])
def test_remat_computes_again_and_changes_no_result(remat):
    def apply(params, variables, inputs, *, rng, train):
        x = inputs[0]
        keep = jax.random.bernoulli(rng, 0.5, x.shape)
        for w in params["w"]:
            x = jnp.sin(x @ w) * keep
        return x, variables

    model = ModelFns(init=lambda rng, inputs: (WEIGHTS, {}), apply=apply)
    batch = (jnp.ones((4, 3)), jnp.ones((4, 3)))
    state = steps.init_state(model, optax.sgd(0.1), jax.random.key(0), inputs=(batch[0],))

    def make(**options):
        return steps.make_train_step(model, mse, optax.sgd(0.1), **options)

    def count_sines(step):
        return str(jax.make_jaxpr(step)(state, batch)).count("sin ")

    plain, again = make(), make(remat=remat)
    assert_trees_close(again(state, batch)[0].params, plain(state, batch)[0].params)
    assert count_sines(again) > count_sines(plain)


def assert_trees_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


WEIGHTS = {"w": list(np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32))}


def linear_step(optimizer, **options):
    model = ModelFns(
        init=lambda rng, inputs: ({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, {}),
        apply=lambda p, v, inputs, *, rng, train: (inputs[0] @ p["w"] + p["b"], v),
    )
    batch = (jnp.ones((4, 3)), jnp.zeros((4, 2)))
    state = steps.init_state(model, optimizer, jax.random.key(0), inputs=(batch[0],))
    step = steps.make_train_step(model, mse, optimizer, **options)
    return state, *step(state, batch)


def test_clipping_is_that_of_optax():
    before, _, output = linear_step(optax.sgd(0.1))
    norm = float(output.gradients_l2norm)
    for clip_norm in (norm / 3, norm * 3):
        expected = optax.chain(optax.clip_by_global_norm(clip_norm), optax.sgd(0.1))
        _, clipped, output = linear_step(optax.sgd(0.1), clip_norm=clip_norm)
        assert float(output.gradients_l2norm) == pytest.approx(norm)
        assert_trees_close(clipped.params, linear_step(expected)[1].params)
    assert before.step == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [({"remat": "dot"}, "remat must be"), ({"clip_norm": 0}, "clip_norm must be positive")],
)
def test_wrong_switches_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        linear_step(optax.sgd(0.1), **option)


def test_switches_that_are_off_cost_nothing():
    tx = optax.adam(0.1)
    step = steps.make_train_step(FNS, mse, tx, on_nan="ignore")

    def switched_off(params, opt_state, batch):
        state, output = step(start(tx).replace(params=params, opt_state=opt_state), batch)
        return state.params, state.opt_state, output.loss

    def by_hand(params, opt_state, batch):
        x, y = batch
        loss, grads = jax.value_and_grad(lambda p: mse(x @ p["w"] + p["b"], y))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def instructions(function):
        lowered = jax.jit(function).lower(PARAMS, tx.init(PARAMS), (X, Y))
        names = re.findall(r"= \S+ ([a-z-]+)\(", lowered.compile().as_text())
        return collections.Counter(names)

    assert instructions(switched_off) == instructions(by_hand)
