import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tekoa
from tekoa.loop import start
from tekoa.loop.flat import Form
from tekoa.loop.placement import Placement, choose_layout
from tekoa.loop.training import ModelTraining, Options


def form(**params):
    tx = optax.sgd(0.1)
    fns = tekoa.as_model_fns(params, lambda params, x: x)
    return tekoa.init_state(fns, tx, jax.random.key(0), inputs=()).replace(rng=jnp.zeros(2))


def test_without_devices_a_batch_stays_as_it_is():
    batch = (np.zeros((4, 2)), np.zeros(4))
    assert Placement(None).batch(batch) is batch


def test_rows_are_split_and_the_rest_is_everywhere():
    place = Placement(choose_layout(None, jax.devices()))
    placed = place.batch(np.zeros((16, 3), np.float32))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    whole = place.whole({"w": jnp.ones((16, 3)), "rng": jax.random.key(0)})
    assert {shard.data.shape for shard in whole["w"].addressable_shards} == {(16, 3)}


def test_rows_that_do_not_divide_go_to_all_and_that_is_said_once(caplog):
    place = Placement(choose_layout(None, jax.devices()))
    with caplog.at_level(logging.WARNING, "tekoa"):
        placed = [place.batch(np.zeros((9, 3), np.float32)) for _ in range(2)]
    assert {shard.data.shape for shard in placed[0].addressable_shards} == {(9, 3)}
    (record,) = caplog.records
    assert "9 rows does not divide among 8 devices" in record.message


def test_a_step_gives_back_a_state_that_is_split_as_it_was():
    place = Placement(choose_layout(None, jax.devices()))
    state = form(w=jnp.zeros(16))
    place.fit(state, {})
    step = place.jit(lambda leaves, batch: ([x + batch.sum().astype(x.dtype) for x in leaves], 0))
    leaves, _ = step(jax.tree.leaves(place.state(state)), place.batch(np.ones(16, np.float32)))
    assert all(x.sharding.is_fully_replicated for x in leaves)


def test_split_slots_are_never_gathered():
    fns = tekoa.as_model_fns({f"w{i}": np.ones((64, 64), np.float32) for i in range(3)}, apply_all)
    task = tekoa.TrainTask(
        optimizer=optax.adam(0.1), data=[], loss=lambda y, t: jnp.mean((y - t) ** 2)
    )
    batch = (np.ones((16, 64), np.float32), np.zeros((16, 64), np.float32))
    programs = {}
    for rules in (None, "data"):
        place = Placement(choose_layout(None, jax.devices(), rules))
        training = ModelTraining(fns, task)
        state, _ = start.starting_state(
            training, jax.random.key(0), batch=batch, place=place, options=Options()
        )
        flat = Form(state)
        step = place.jit(flat.step(training.make_step(Options())))
        programs[rules] = step.lower(flat.leaves(state), place.batch(batch)).compile()
    gathered = re.findall(r" all-gather(?:-start)?\(", programs["data"].as_text())
    assert len(gathered) == 3  # Each new parameter once, and no slot.
    plain, split = (programs[rules].memory_analysis() for rules in (None, "data"))
    saved = plain.argument_size_in_bytes - split.argument_size_in_bytes
    assert saved == 2 * 3 * 64 * 64 * 4 * 7 // 8
    assert split.temp_size_in_bytes < plain.temp_size_in_bytes


def apply_all(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x


def test_a_model_is_made_in_its_shards():
    fns = tekoa.as_model_fns(lambda rng: {"w": jax.random.normal(rng, (16, 4))}, lambda params: 0)
    layout = tekoa.Layout(mesh=tekoa.make_mesh(fsdp=8), rules="fsdp")
    params, variables = Placement(layout).new_model(fns, ())
    assert {shard.data.shape for shard in params["w"].addressable_shards} == {(2, 4)}
    np.testing.assert_array_equal(params["w"], Placement(None).new_model(fns, ())[0]["w"])
    assert variables == {}
