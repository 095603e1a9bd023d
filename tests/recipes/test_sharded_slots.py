import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.recipes import sharded_slots

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def test_slots_are_split_and_parameters_whole(model, toy):
    options = {"devices": jax.devices()[:8], "grads": False}
    whole = toy.loop(model, optax.adam(0.05), **options)
    split = toy.loop(model, optax.adam(0.05), optimizer_rules="data", **options)
    losses = [[float(c.loss) for c in loop] for loop in (whole, split)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    mu = split.state.opt_state[0].mu["hidden"]["kernel"]
    assert mu.addressable_shards[0].data.size == mu.size // 8
    assert split.state.params["hidden"]["kernel"].sharding.is_fully_replicated


def test_tiny_slots_of_amos_stay_whole_and_give_the_same(toy):
    one_number = lambda name, shape: ()
    tx = tekoa.amos(0.1, lambda name, shape: 0.5, one_number)
    options = {"devices": jax.devices()[:8], "grads": False}
    whole = toy.loop(toy.models["nnx"](), tx, **options)
    split = toy.loop(toy.models["nnx"](), tx, optimizer_rules="data", **options)
    losses = [[float(c.loss) for c in loop] for loop in (whole, split)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    slots = jax.tree.leaves(split.state.opt_state)
    assert all(slot.shape == () and slot.sharding.is_fully_replicated for slot in slots)


@pytest.mark.slow
def test_recipe_shows_an_eighth():
    for kilobytes in sharded_slots.run(n_steps=2).lines.values():
        # What cannot be split, such as 10 biases, stays whole.
        assert kilobytes[-1] < kilobytes[0] / 7
