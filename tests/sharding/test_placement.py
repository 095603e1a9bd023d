import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.loop import initial_state
from tekoa.loop.engine.flat_state import StateCodec
from tekoa.loop.task import ModelTraining, Options
from tekoa.sharding import placement
from tekoa.sharding.placement import Placement, choose_layout


def form(**params):
    tx = optax.sgd(0.1)
    fns = tekoa.as_model_fns(params, lambda params, x: x)
    return tekoa.init_state(fns, tx, jax.random.key(0), inputs=()).replace(rng=jnp.zeros(2))


def test_without_a_layout_a_batch_is_returned_unchanged():
    batch = (np.zeros((4, 2)), np.zeros(4))
    assert Placement(None).batch(batch) is batch


def test_a_mesh_is_no_layout():
    with pytest.raises(TypeError, match=r"must be a Layout, such as Layout\(mesh\), got .*Mesh"):
        choose_layout(tekoa.make_mesh(devices=jax.devices()), None)  # pyright: ignore


def test_rows_are_split_and_other_arrays_are_replicated():
    place = Placement(choose_layout(None, jax.devices()))
    placed = place.batch(np.zeros((16, 3), np.float32))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    whole = place.whole({"w": jnp.ones((16, 3)), "rng": jax.random.key(0)})
    assert {shard.data.shape for shard in whole["w"].addressable_shards} == {(16, 3)}


def test_rows_that_cannot_be_split_are_replicated_with_one_warning(caplog):
    place = Placement(choose_layout(None, jax.devices()))
    with caplog.at_level(logging.WARNING, "tekoa"):
        placed = [place.batch(np.zeros((9, 3), np.float32)) for _ in range(2)]
    assert {shard.data.shape for shard in placed[0].addressable_shards} == {(9, 3)}
    (record,) = caplog.records
    assert "9 rows cannot be split into 8 equal parts" in record.message


def test_a_step_returns_a_state_with_the_same_shardings():
    place = Placement(choose_layout(None, jax.devices()))
    state = form(w=jnp.zeros(16))
    place.fit(state, {})
    step = place.jit(lambda leaves, batch: ([x + batch.sum().astype(x.dtype) for x in leaves], 0))
    leaves, _ = step(jax.tree.leaves(place.state(state)), place.batch(np.ones(16, np.float32)))
    assert all(x.sharding.is_fully_replicated for x in leaves)


def test_sharded_optimizer_slots_are_never_gathered():
    fns = tekoa.as_model_fns({f"w{i}": np.ones((64, 64), np.float32) for i in range(3)}, apply_all)
    task = tekoa.TrainTask(
        optimizer=optax.adam(0.1), data=[], loss=lambda y, t: jnp.mean((y - t) ** 2)
    )
    batch = (np.ones((16, 64), np.float32), np.zeros((16, 64), np.float32))
    programs = {}
    for rules in (None, "data"):
        place = Placement(choose_layout(None, jax.devices(), rules))
        training = ModelTraining(fns, task)
        state, *_ = initial_state.init_or_restore(
            training, jax.random.key(0), batch=batch, place=place, options=Options()
        )
        flat = StateCodec(state)
        step = place.jit(flat.flat_step(training.make_step(Options())))
        programs[rules] = step.lower(flat.flatten(state), place.batch(batch)).compile()
    gathered = re.findall(r" all-gather(?:-start)?\(", programs["data"].as_text())
    assert len(gathered) == 3  # Each updated parameter once, and no slot.
    plain, split = (programs[rules].memory_analysis() for rules in (None, "data"))
    saved = plain.argument_size_in_bytes - split.argument_size_in_bytes
    assert saved == 2 * 3 * 64 * 64 * 4 * 7 // 8
    assert split.temp_size_in_bytes < plain.temp_size_in_bytes


def apply_all(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x


def test_a_model_is_created_in_shards():
    fns = tekoa.as_model_fns(lambda rng: {"w": jax.random.normal(rng, (16, 4))}, lambda params: 0)
    layout = tekoa.Layout(mesh=tekoa.make_mesh(fsdp=8), rules="fsdp")
    params, variables = Placement(layout).new_model(fns, ())
    assert {shard.data.shape for shard in params["w"].addressable_shards} == {(2, 4)}
    np.testing.assert_array_equal(params["w"], Placement(None).new_model(fns, ())[0]["w"])
    assert variables == {}


def test_put_batch_accepts_one_sharding_or_one_per_array():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    batch = {"x": np.arange(4), "y": np.arange(2)}
    assert placement.put_batch(batch, rows)["y"].sharding == rows
    assert placement.put_batch(batch, {"x": rows, "y": whole})["y"].sharding == whole
    assert placement.put_batch(batch, None)["x"].devices() == {jax.devices()[0]}


def test_put_uses_the_sharding_of_each_array():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    values = [np.arange(4), jax.random.key(3), np.float32(2)]
    placed = placement.put(values, [rows, whole, None])
    assert placed[0].sharding == rows
    assert [int(x.data[0]) for x in placed[0].addressable_shards] == [0, 2]
    assert placed[1].sharding == whole
    assert (jax.random.key_data(placed[1]) == jax.random.key_data(values[1])).all()
    assert float(placed[2]) == 2


def test_arrays_that_span_processes_are_created_from_shards():
    """One process is enough to check shards and keys."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    table = np.arange(8.0).reshape(4, 2)
    placed = placement._put_remote(table, rows)
    assert placed.sharding.is_equivalent_to(rows, 2)
    assert (np.asarray(placed) == table).all()
    keys = jax.random.split(jax.random.key(5), 4)
    for sharding in (rows, whole):
        moved = placement._put_remote(keys, sharding)
        assert moved.sharding.is_equivalent_to(sharding, 1)
        assert (jax.random.key_data(moved) == jax.random.key_data(keys)).all()
