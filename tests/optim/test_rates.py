import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tekoa.optim import rates
from tekoa.optim.amos import transform
from tekoa.optim.groups import param_groups
from tekoa.optim.triples import classic, convert
from tekoa.testing import assert_trees_equal

PARAMS = {
    "encoder": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 1)), "bias": jnp.ones(1)},
}


class NnxModel(nnx.Module):
    def __init__(self):
        self.encoder = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def one_step(tx):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def rates_of(state):
    return {group: float(rate) for group, rate in rates.current_rates(state).items()}


def test_rates_of_all_groups_can_be_read_during_training():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = param_groups(
        {
            "^head/bias": None,
            "^head": rates.rated(optax.adamw, schedule, weight_decay=0.1),
            "bias$": rates.rated(optax.sgd, 0.25),
            "kernel$": optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
        }
    )
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    expected = {"^head/bias": 0.0, "^head": 1.0, "bias$": 0.25, "kernel$": 1.0}
    assert rates_of(state) == pytest.approx(expected)
    for i in range(4):
        updates, state = update(PARAMS, state, params)
        # The reported rate is the one in use: it is minus the update of sgd.
        expected |= {"^head": 1 - i / 10, "kernel$": 1 - i / 10}
        assert rates_of(state) == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(updates["encoder"]["kernel"], i / 10 - 1, rtol=1e-6)
    json.dumps(rates_of(state))


def test_amos_rate_follows_its_own_count():
    schedule = lambda count: 0.1 * count
    eta = lambda name, shape: 1.0
    tx = rates.rated(transform.amos, schedule, eta_fn=eta)
    updates, state = one_step(tx)
    alone, _ = one_step(transform.amos(schedule, eta))
    assert_trees_equal(updates, alone)
    assert rates_of(state) == {"all": pytest.approx(0.1)}


def test_rated_does_not_change_the_updates():
    for learning_rate in (0.1, optax.linear_schedule(0.1, 0.0, 5)):
        rated, plain = rates.rated(optax.adam, learning_rate), optax.adam(learning_rate)
        state, plain_state = rated.init(PARAMS), plain.init(PARAMS)
        for _ in range(3):
            updates, state = rated.update(PARAMS, state)
            expected, plain_state = plain.update(PARAMS, plain_state)
            assert_trees_equal(updates, expected)
        assert_trees_equal(state.inner, plain_state)


def test_rates_are_found_through_wrappers_and_nested_groups():
    triple = lambda rate: convert.from_triple(classic.adam(rate))
    inner = param_groups({"bias$": rates.rated(triple, 0.5), ".*": optax.sgd(1.0)})
    tx = param_groups({"^head": inner, ".*": rates.rated(optax.sgd, 0.125)})
    chain = optax.chain(optax.clip(1.0), tx)
    assert rates_of(chain.init(PARAMS)) == {"^head/bias$": 0.5, ".*": 0.125}
    steps = optax.MultiSteps(chain, 2)
    assert rates_of(steps.init(PARAMS)) == {"^head/bias$": 0.5, ".*": 0.125}
    assert rates_of(optax.adam(1.0).init(PARAMS)) == {}
    model = NnxModel()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert rates_of(optimizer.opt_state) == {"^head/bias$": 0.5, ".*": 0.125}
