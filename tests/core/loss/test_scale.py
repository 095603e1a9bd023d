"""Training in float16: gradients that would vanish, overflows, and what is reported."""

import contextlib
import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.core import step as steps
from tekoa.core.loss import scale as loss_scale
from tekoa.core.model import ModelFns
from tekoa.testing import check_resume

ROWS = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def model_with(size=1.0, n_seen=False):
    """A linear model whose outputs have `size`; it may count its training steps."""

    def apply(params, variables, inputs, *, rng, train):
        changed = {"seen": {"n": variables["seen"]["n"] + 1}} if n_seen else {}
        return size * (inputs[0] @ params["w"]) + params["b"], changed

    def init(rng, inputs):
        variables = {"seen": {"n": jnp.zeros((), jnp.int32)}} if n_seen else {}
        return {"w": jnp.float32([0.5, -1.0, 2.0]), "b": jnp.zeros(())}, variables

    return ModelFns(init=init, apply=apply)


def start(model, tx, **options):
    options = {"precision": "fp16", **options}
    return steps.init_state(model, tx, jax.random.key(0), inputs=(ROWS[0],), **options)


def run_one(model, loss, tx, batch, precision="fp16", **options):
    state = start(model, tx, precision=precision)
    step = steps.make_train_step(model, loss, tx, precision=precision, keep_grads=True, **options)
    return jax.jit(step)(state, batch)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_too_small_for_float16_survive(accumulate):
    def tiny(out, y):
        return 1e-8 * mse(out, y)

    batch = ROWS[0], ROWS[0].sum(1)
    tx = optax.sgd(1.0)
    _, output = run_one(model_with(), tiny, tx, batch, accumulate=accumulate)
    _, exact = run_one(model_with(), tiny, tx, batch, precision="float32")
    np.testing.assert_allclose(output.grads["w"], exact.grads["w"], rtol=1e-2)
    # Without a scale they are lost: the gradients of single rows are below 6e-8.
    unscaled = jax.grad(lambda w: tiny((ROWS[0].astype(np.float16) @ w).astype(np.float32), 0.0))
    assert not np.any(unscaled(np.float16([0.5, -1.0, 2.0])))


def test_the_scale_does_not_depend_on_the_number_of_tokens():
    def total(out, y):
        return tekoa.Mean(jnp.sum(1e5 * (out - y)), jnp.float32(1e5 * out.size))

    state, _ = run_one(model_with(), total, optax.sgd(0.1), (ROWS[0], ROWS[0].sum(1)))
    assert int(state.loss_scale.n_overflows) == 0


def simulated(sizes, scale, n_good_steps):
    """The rule of dynamic loss scaling in plain Python, for gradients of these sizes."""
    n_good, scales, skipped = 0, [], []
    for size in sizes:
        is_overflow = size * scale > 65504
        skipped.append(is_overflow)
        n_good = 0 if is_overflow else n_good + 1
        scale = scale / 2 if is_overflow else scale
        if n_good == n_good_steps:
            scale, n_good = scale * 2, 0
        scales.append(scale)
    return scales, skipped


@pytest.mark.parametrize("on_nan", ["stop", "skip", "count", "ignore"])
def test_overflows_halve_the_scale_and_skip_the_update(monkeypatch, on_nan):
    monkeypatch.setattr(loss_scale, "N_GOOD_STEPS", 3)
    sizes = np.float32([1, 60, 60, 60, 60, 60, 1, 1, 1, 1, 1, 1, 200, 200, 1, 1, 1])
    expected, skipped = simulated(sizes, 2.0**15, 3)
    assert sum(skipped) > 4
    # The mean over one row: the gradient of `w` is the input.
    model = ModelFns(
        init=lambda rng, inputs: ({"w": jnp.ones(1)}, {"seen": {"n": jnp.zeros(())}}),
        apply=lambda p, v, inputs, *, rng, train: (
            inputs[0] * p["w"],
            {"seen": {"n": v["seen"]["n"] + 1}},
        ),
    )
    tx = optax.adam(0.1)
    state = steps.init_state(
        model, tx, jax.random.key(0), inputs=(sizes[:1, None],), ema=0.9, precision="fp16"
    )
    step = jax.jit(
        steps.make_train_step(
            model, lambda out, _: jnp.mean(out), tx, precision="fp16", on_nan=on_nan, ema=0.9
        )
    )
    for i, size in enumerate(sizes):
        old = state
        state, output = step(state, (np.full((1, 1), size), np.zeros(1)))
        assert float(state.loss_scale.scale) == expected[i]
        same = [
            bool(np.array_equal(a, b))
            for a, b in zip(
                jax.tree.leaves((old.params, old.opt_state, old.average)),
                jax.tree.leaves((state.params, state.opt_state, state.average)),
                strict=True,
            )
        ]
        assert all(same) if skipped[i] else not any(same)
        assert np.isfinite(output.loss)
    assert int(state.step) == len(sizes) == int(state.variables["seen"]["n"])
    assert int(state.loss_scale.n_overflows) == sum(skipped)
    assert int(state.health.n_bad) == 0


def test_clipping_acts_on_the_gradients_of_the_loss_itself():
    batch = 0.1 * ROWS[0], ROWS[0].sum(1)
    _, exact = run_one(model_with(), mse, optax.sgd(1.0), batch, precision="float32")
    clip_norm = float(exact.gradients_l2norm) / 2
    state, _ = run_one(model_with(), mse, optax.sgd(1.0), batch, clip_norm=clip_norm)
    old = start(model_with(), optax.sgd(1.0)).params
    moved = jax.tree.map(lambda a, b: a - b, old, state.params)
    assert float(optax.tree.norm(moved)) == pytest.approx(clip_norm, rel=1e-3)


# ---- in a loop


def fp16_loop(model, data=None, *, loss=mse, tx=None, **options):
    data = [(x, x.sum(1)) for x in ROWS] if data is None else data
    options = {"n_steps": len(data), "n_steps_per_checkpoint": 5, "precision": "fp16", **options}
    task = tekoa.TrainTask(optimizer=tx or optax.adam(0.05), loss=loss, data=data)
    return tekoa.TrainLoop(model, task, **options)


class LinenLine(nn.Module):
    @nn.compact
    def __call__(self, x):
        assert x.dtype in (jnp.float16, jnp.float32)
        return nn.Dense(1)(x)[:, 0]


class NnxLine(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)[:, 0]


class EquinoxLine(eqx.Module):
    dense: eqx.nn.Linear

    def __init__(self):
        self.dense = eqx.nn.Linear(3, 1, key=jax.random.key(0))

    def __call__(self, x):
        return self.dense(x)[0]


LIBRARIES = {
    "linen": LinenLine,
    "nnx": NnxLine,
    "equinox": EquinoxLine,
    "haiku": lambda: hk.transform(lambda x: hk.Linear(1)(x)[:, 0]),
    "function": model_with,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_models_of_all_libraries_learn_in_float16(library):
    loop = fp16_loop(LIBRARIES[library](), on_nan="stop", ema=0.5)
    losses = [c.metrics["train"]["loss"] for c in loop]
    assert losses[-1] < losses[0]
    metrics = next(iter(fp16_loop(LIBRARIES[library]()))).metrics["train"]
    assert metrics["loss_scale"] == 2.0 ** (15 - metrics["overflow_steps"])
    dtypes = {x.dtype.name for x in jax.tree.leaves((loop.state.params, loop.state.average))}
    assert dtypes == {"float32"}


def overflowing_data():
    """Every seventh batch has gradients that overflow at the first scale."""
    return [(x * (100.0 if i % 7 == 3 else 1.0), x.sum(1)) for i, x in enumerate(ROWS)]


def make_loop(reader, **options):
    # Adam stays near the solution in spite of the large rows.
    model, data = reader(model_with()), overflowing_data()
    return fp16_loop(model, data, tx=optax.adam(1e-3), ema=0.9, accumulate=2, **options)


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_a_resumed_run_has_the_same_bits(steps_per_dispatch):
    loop = make_loop(lambda model: model, steps_per_dispatch=steps_per_dispatch)
    *_, last = loop
    assert last.metrics["train"]["overflow_steps"] >= 2
    assert last.metrics["train"]["loss_scale"] < 2.0**15
    assert "skipped_steps" not in last.metrics["train"]
    make = functools.partial(make_loop, steps_per_dispatch=steps_per_dispatch)
    check_resume(make, at=20, n_kills=0)


def test_the_scale_is_in_the_checkpoint_files(tmp_path):
    with contextlib.closing(tekoa.CheckpointFileWriter(tmp_path)) as writer:
        for checkpoint in make_loop(lambda model: model).until(20):
            writer(checkpoint)
    resumed = make_loop(lambda model: tekoa.CheckpointFileReader(tmp_path, model))
    assert resumed.step == 20
    assert float(resumed.state.loss_scale.scale) == float(checkpoint.state.loss_scale.scale)
    assert int(resumed.state.loss_scale.n_overflows) > 0


def test_several_devices_give_the_result_of_one():
    alone, spread = make_loop(lambda m: m), make_loop(lambda m: m, devices=jax.devices()[:4])
    for a, b in zip(alone, spread, strict=True):
        assert a.metrics["train"]["loss_scale"] == b.metrics["train"]["loss_scale"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3),
        alone.state.params,
        spread.state.params,
    )


def test_nan_in_the_loss_is_reported_at_once():
    data = [(x, x.sum(1)) for x in ROWS]
    data[12] = data[12][0] * np.nan, data[12][1]
    loop = fp16_loop(model_with(), data)
    with pytest.raises(tekoa.NonFiniteError, match="At step 13 the loss was nan"):
        list(loop)
    assert loop.step == 12
    assert float(loop.state.loss_scale.scale) > 2.0**10


def test_nan_in_the_loss_is_no_overflow():
    """With "count" the update is applied, as without a scale, and the scale stays."""
    batch = np.full((8, 3), np.nan, np.float32), ROWS[0].sum(1)
    state, _ = run_one(model_with(), mse, optax.sgd(0.1), batch, on_nan="count")
    assert float(state.loss_scale.scale) == loss_scale.INITIAL
    assert int(state.loss_scale.n_overflows) == 0
    assert np.isnan(state.params["w"]).all()


def test_nan_in_gradients_alone_is_reported_at_the_smallest_scale():
    def loss(out, y):
        # Finite, but the derivative of a root at zero is not.
        return mse(out, y) + jnp.mean(jnp.sqrt(0.0 * out))

    loop = fp16_loop(model_with(), loss=loss)
    with pytest.raises(tekoa.NonFiniteError, match="At step 16 the gradient of"):
        list(loop)
    assert loop.step == 15  # Each of them halved the scale.
    assert float(loop.state.loss_scale.scale) == 1
    np.testing.assert_array_equal(loop.state.params["w"], np.float32([0.5, -1.0, 2.0]))


def test_a_state_without_a_scale_is_refused():
    tx = optax.sgd(0.1)
    step = steps.make_train_step(model_with(), mse, tx, precision="fp16")
    with pytest.raises(ValueError, match="needs a loss scale"):
        step(start(model_with(), tx, precision="float32"), (ROWS[0], ROWS[0].sum(1)))
