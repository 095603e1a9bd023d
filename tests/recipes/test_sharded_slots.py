import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.recipes import sharded_slots

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def test_slots_are_sharded_and_parameters_replicated(model, toy):
    options = {"devices": jax.devices()[:8], "grads": False}
    replicated = toy.loop(model, optax.adam(0.05), **options)
    sharded = toy.loop(model, optax.adam(0.05), optimizer_rules="data", **options)
    losses = [[float(c.loss) for c in loop] for loop in (replicated, sharded)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    mu = sharded.state.opt_state[0].mu["hidden"]["kernel"]
    assert mu.addressable_shards[0].data.size == mu.size // 8
    assert sharded.state.params["hidden"]["kernel"].sharding.is_fully_replicated


def test_scalar_slots_of_amos_are_replicated(toy):
    scalar = lambda name, shape: ()
    tx = tekoa.amos(0.1, lambda name, shape: 0.5, scalar)
    options = {"devices": jax.devices()[:8], "grads": False}
    replicated = toy.loop(toy.models["nnx"](), tx, **options)
    sharded = toy.loop(toy.models["nnx"](), tx, optimizer_rules="data", **options)
    losses = [[float(c.loss) for c in loop] for loop in (replicated, sharded)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    slots = jax.tree.leaves(sharded.state.opt_state)
    assert all(slot.shape == () and slot.sharding.is_fully_replicated for slot in slots)


@pytest.mark.slow
def test_the_recipe_needs_an_eighth_of_the_memory():
    for kilobytes in sharded_slots.run(n_steps=2).lines.values():
        # Arrays that 8 does not divide, such as 10 biases, are replicated.
        assert kilobytes[-1] < kilobytes[0] / 7
