import logging

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.loop.placement import Placement


def test_without_devices_a_batch_stays_as_it_is():
    batch = (np.zeros((4, 2)), np.zeros(4))
    assert Placement(None).batch(batch) is batch


def test_rows_are_split_and_the_rest_is_everywhere():
    place = Placement(jax.devices())
    placed = place.batch(np.zeros((16, 3), np.float32))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    whole = place.whole({"w": jnp.ones((16, 3)), "rng": jax.random.key(0)})
    assert {shard.data.shape for shard in whole["w"].addressable_shards} == {(16, 3)}


def test_rows_that_do_not_divide_go_to_all_and_that_is_said_once(caplog):
    place = Placement(jax.devices())
    with caplog.at_level(logging.WARNING, "tekoa"):
        placed = [place.batch(np.zeros((9, 3), np.float32)) for _ in range(2)]
    assert {shard.data.shape for shard in placed[0].addressable_shards} == {(9, 3)}
    (record,) = caplog.records
    assert "9 rows does not divide among 8 devices" in record.message


def test_a_step_gives_back_a_state_that_is_everywhere():
    place = Placement(jax.devices())
    step = place.jit(lambda state, batch: ([state[0] + batch], batch.sum()))
    state, _ = step([place.whole(jnp.zeros(16))], place.batch(np.ones(16, np.float32)))
    assert state[0].sharding.is_fully_replicated
