import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.optim.groups import UnusedRuleWarning
from tekoa.optim.unfreeze import unfreeze_at
from tekoa.testing import assert_trees_equal, check_resume

RNG = np.random.default_rng(0)
PARAMS = {"body": jnp.float32([1.0, -0.0, 2.0]), "head": jnp.ones(2)}
GRADS = [
    {name: RNG.normal(size=x.shape).astype(np.float32) for name, x in PARAMS.items()}
    for _ in range(6)
]


def run(tx, params, all_grads):
    state, path = tx.init(params), []
    for grads in all_grads:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return path


def test_a_frozen_parameter_keeps_its_bits_and_then_trains_as_if_alone():
    adamw = optax.adamw(0.1, weight_decay=0.1)
    path = run(unfreeze_at(adamw, {"^body": 3}), PARAMS, GRADS)
    for params in path[:3]:
        assert_trees_equal(params["body"], PARAMS["body"])
    body = run(adamw, {"body": PARAMS["body"]}, [{"body": g["body"]} for g in GRADS[3:]])
    head = run(adamw, {"head": PARAMS["head"]}, [{"head": g["head"]} for g in GRADS])
    np.testing.assert_allclose(path[-1]["body"], body[-1]["body"], rtol=1e-6)
    np.testing.assert_allclose(path[-1]["head"], head[-1]["head"], rtol=1e-6)


def test_schedules_follow_the_updates_of_training():
    rates = optax.piecewise_constant_schedule(1.0, {4: 0.1})
    path = run(unfreeze_at(optax.sgd(rates), {"body": 3}), PARAMS, GRADS)
    expected = np.asarray(PARAMS["body"])
    for i in (3, 4, 5):
        expected = expected - (1.0 if i < 4 else 0.1) * GRADS[i]["body"]
    np.testing.assert_allclose(path[-1]["body"], expected, rtol=1e-5)


def make_loop(reader, **options):
    task = tekoa.TrainTask(
        apply=lambda p, x: jnp.tanh(x @ p["body"]) @ p["head"],
        optimizer=optax.adam(0.05),
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=DATA,
        unfreeze_at={"body": 6},
    )
    params = {"body": jnp.eye(3), "head": jnp.ones(3)}
    return tekoa.TrainLoop(reader(params), task, n_steps=12, n_steps_per_checkpoint=4, **options)


DATA = [(x, x.sum(1)) for x in RNG.normal(size=(12, 8, 3)).astype(np.float32)]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "ema": 0.9, "precision": "fp16"}])
def test_a_resumed_loop_unfreezes_at_the_same_step(options):
    bodies = {c.step: np.asarray(c.model_params["body"]) for c in make_loop(lambda m: m, **options)}
    np.testing.assert_array_equal(bodies[4], np.eye(3))
    assert np.all(bodies[8] != np.eye(3))
    check_resume(lambda reader: make_loop(reader, **options), at=4, n_kills=0)


def test_several_devices_give_the_result_of_one():
    alone, spread = make_loop(lambda m: m), make_loop(lambda m: m, devices=jax.devices()[:4])
    for a, b in zip(alone, spread, strict=True):
        np.testing.assert_allclose(a.model_params["body"], b.model_params["body"], rtol=1e-4)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="from 1 up, got 0"):
        unfreeze_at(optax.sgd(0.1), {"body": 0})
    with pytest.warns(UnusedRuleWarning, match="bodi"):
        unfreeze_at(optax.sgd(0.1), {"bodi": 3}).init(PARAMS)
