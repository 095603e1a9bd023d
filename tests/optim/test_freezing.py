import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import tekoa
from tekoa.core import trees
from tekoa.optim.freezing import NeverTrainedError, freeze_on_schedule
from tekoa.optim.groups import UnusedRuleWarning
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
    path = run(freeze_on_schedule(adamw, unfreeze_at={"^body": 3}), PARAMS, GRADS)
    for params in path[:3]:
        assert_trees_equal(params["body"], PARAMS["body"])
    body = run(adamw, {"body": PARAMS["body"]}, [{"body": g["body"]} for g in GRADS[3:]])
    head = run(adamw, {"head": PARAMS["head"]}, [{"head": g["head"]} for g in GRADS])
    np.testing.assert_allclose(path[-1]["body"], body[-1]["body"], rtol=1e-6)
    np.testing.assert_allclose(path[-1]["head"], head[-1]["head"], rtol=1e-6)


def test_a_parameter_trains_between_the_two_updates_only():
    adamw = optax.adamw(0.1, weight_decay=0.1)
    tx = freeze_on_schedule(adamw, unfreeze_at={"^body": 2}, freeze_at={"o": 4, "head": 5})
    path = run(tx, PARAMS, GRADS)  # The first match freezes body after 4 updates.
    body = run(adamw, {"body": PARAMS["body"]}, [{"body": g["body"]} for g in GRADS[2:4]])
    head = run(adamw, {"head": PARAMS["head"]}, [{"head": g["head"]} for g in GRADS[:5]])
    np.testing.assert_allclose(path[3]["body"], body[-1]["body"], rtol=1e-6)
    np.testing.assert_allclose(path[4]["head"], head[-1]["head"], rtol=1e-6)
    assert_trees_equal(path[5]["body"], path[3]["body"])
    assert_trees_equal(path[5]["head"], path[4]["head"])


def test_a_frozen_parameter_keeps_its_slots():
    tx = freeze_on_schedule(optax.adam(0.1), freeze_at={"^body": 2})
    state, slots = tx.init(PARAMS), []
    for grads in GRADS[:4]:
        _, state = tx.update(grads, state, PARAMS)
        slots.append(state.inner.inner_states["0-2"])
    assert_trees_equal(slots[3], slots[1])
    assert not np.array_equal(jax.tree.leaves(slots[1])[-1], jax.tree.leaves(slots[0])[-1])


def test_rates_that_are_reported_follow_the_updates_of_training():
    rates = optax.linear_schedule(1.0, 0.0, 10)
    tx = freeze_on_schedule(tekoa.rated(optax.sgd, rates), unfreeze_at={"body": 3})
    state = tx.init(PARAMS)
    for grads in GRADS[:5]:
        _, state = tx.update(grads, state, PARAMS)
    reported = tekoa.current_rates(state)
    assert float(reported["3"]) == float(reported["0"]) == pytest.approx(0.6)


def test_schedules_follow_the_updates_of_training():
    rates = optax.piecewise_constant_schedule(1.0, {4: 0.1})
    path = run(freeze_on_schedule(optax.sgd(rates), unfreeze_at={"body": 3}), PARAMS, GRADS)
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
        freeze_at={"body": 10, "head": 7},
    )
    params = {"body": jnp.eye(3), "head": jnp.ones(3)}
    return tekoa.TrainLoop(reader(params), task, n_steps=12, n_steps_per_checkpoint=4, **options)


DATA = [(x, x.sum(1)) for x in RNG.normal(size=(12, 8, 3)).astype(np.float32)]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "ema": 0.9, "precision": "fp16"}])
def test_a_resumed_loop_unfreezes_at_the_same_step(options):
    bodies = {c.step: np.asarray(c.model_params["body"]) for c in make_loop(lambda m: m, **options)}
    np.testing.assert_array_equal(bodies[4], np.eye(3))
    assert np.all(bodies[8] != np.eye(3))
    assert np.all(bodies[12] != bodies[8])
    for at in (4, 8):
        check_resume(lambda reader: make_loop(reader, **options), at=at, n_kills=0)


def test_several_devices_give_the_result_of_one():
    alone, spread = make_loop(lambda m: m), make_loop(lambda m: m, devices=jax.devices()[:4])
    for a, b in zip(alone, spread, strict=True):
        np.testing.assert_allclose(a.model_params["body"], b.model_params["body"], rtol=1e-4)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1, name="head")(linen.tanh(linen.Dense(3, name="body")(x)))[:, 0]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.body(x)))[:, 0]


def equinox_model():
    eqx = pytest.importorskip("equinox")

    class EquinoxModel(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jnp.tanh(self.body(x)))[0]

    keys = jax.random.split(jax.random.key(0))
    return EquinoxModel(eqx.nn.Linear(3, 3, key=keys[0]), eqx.nn.Linear(3, 1, key=keys[1]))


@pytest.mark.parametrize("make", [LinenModel, lambda: NnxModel(nnx.Rngs(0)), equinox_model])
def test_models_of_every_library_are_frozen_by_name(make):
    task = tekoa.TrainTask(
        optimizer="auto",
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=DATA,
        unfreeze_at={"body": 2},
        freeze_at={"body": 4, "head": 6},
    )
    loop = tekoa.TrainLoop(make(), task, n_steps=8, n_steps_per_checkpoint=1, stdout=False)
    path = [jax.tree.map(np.asarray, trees.named_leaves(loop.state.params))]
    path += [jax.tree.map(np.asarray, trees.named_leaves(c.state.params)) for c in loop]
    kernels = [name for name in path[0] if name[-1] in ("kernel", "weight")]
    changes = {
        name[0]: [i for i in range(8) if np.any(path[i][name] != path[i + 1][name])]
        for name in kernels
    }
    assert changes == {"body": [2, 3], "head": [0, 1, 2, 3, 4, 5]}


def test_mistakes_are_named():
    sgd = optax.sgd(0.1)
    with pytest.raises(ValueError, match="from 1 up, got 0"):
        freeze_on_schedule(sgd, unfreeze_at={"body": 0})
    with pytest.raises(ValueError, match=r"freeze_at\['body'\] .* got 2.5"):
        freeze_on_schedule(sgd, freeze_at={"body": 2.5})
    for name in ("unfreeze_at", "freeze_at"):
        with pytest.warns(UnusedRuleWarning, match="bodi"):
            freeze_on_schedule(sgd, **{name: {"bodi": 3}}).init(PARAMS)
    tx = freeze_on_schedule(sgd, unfreeze_at={"body": 5}, freeze_at={"b": 5})
    with pytest.raises(NeverTrainedError, match=r"'body' would never train: .* 5 .* 5"):
        tx.init(PARAMS)
