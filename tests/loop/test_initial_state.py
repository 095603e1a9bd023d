import dataclasses
import types

import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.loop import initial_state
from tekoa.loop.task import ModelTraining, Options, Restored
from tekoa.sharding import placement
from tekoa.sharding.mesh import LayoutError


def apply(params, x):
    return x @ params["w"]


def init(rng, x):
    return {"w": jax.random.normal(rng, (x.shape[-1], 16))}


TASK = tekoa.TrainTask(optimizer=optax.adam(0.1), data=[], loss=lambda y, t: ((y - t) ** 2).mean())
BATCH = (np.ones((8, 4), np.float32), np.zeros((8, 16), np.float32))


def start(layout=None, **options):
    place = placement.Placement(layout)
    training = ModelTraining(tekoa.as_model_fns(init, apply), TASK)
    options = {"batch": BATCH, "place": place, "options": Options(), **options}
    return initial_state.init_or_restore(training, jax.random.key(1), **options)[0]


def test_a_sharded_state_has_the_same_numbers():
    layout = tekoa.Layout(mesh=tekoa.make_mesh(fsdp=8), rules="fsdp")
    state, unsharded = start(layout), start()
    shapes = {shard.data.shape for shard in state.params["w"].addressable_shards}
    assert shapes == {(4, 2)}
    assert state.opt_state[0].mu["w"].sharding == state.params["w"].sharding
    np.testing.assert_array_equal(state.params["w"], unsharded.params["w"])


def test_a_reader_receives_shapes_and_shardings():
    received = []

    class Reader:
        target = None

        def restore(self, fresh):
            received.append(fresh)

    layout = tekoa.Layout(mesh=tekoa.make_mesh(fsdp=8), rules="fsdp")
    start(layout, reader=Reader())
    (fresh,) = received
    assert isinstance(fresh.params["w"], jax.ShapeDtypeStruct)
    assert fresh.params["w"].sharding.spec == jax.P(None, "fsdp")


def test_a_batch_that_does_not_divide_is_an_error():
    layout = tekoa.Layout(mesh=tekoa.make_mesh(data=3))
    with pytest.raises(ValueError, match=r"8 rows cannot be split into 3 equal parts.*data=3"):
        start(layout)


def test_steps_per_dispatch_are_as_requested_else_as_saved_else_one_for_several_processes():
    alone = types.SimpleNamespace(spans_processes=False)
    many = types.SimpleNamespace(spans_processes=True)
    saved = restored(8)
    assert initial_state.resolve_steps_per_dispatch(2, saved, alone) == 2
    assert initial_state.resolve_steps_per_dispatch("auto", saved, many) == 8
    assert initial_state.resolve_steps_per_dispatch("auto", restored(None), alone) == "auto"
    assert initial_state.resolve_steps_per_dispatch("auto", None, many) == 1


def restored(n):
    return types.SimpleNamespace(facts={"steps_per_dispatch": n})


@pytest.mark.parametrize(("on_nan", "n_bad"), [("stop", 0), ("skip", 1)])
def test_steps_skipped_by_an_earlier_run_do_not_stop_this_one(on_nan, n_bad):
    state = start()
    one = jax.numpy.int32(1)
    skipped = state.replace(health=state.health._replace(n_bad=one, first_step=one))
    reader = types.SimpleNamespace(target=None, restore=lambda _: Restored(state=skipped))
    state = start(reader=reader, options=Options(on_nan=on_nan))
    assert int(state.health.n_bad) == n_bad


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_lbfgs_refuses_slots_split_over_explicit_axes(kind):
    axis_types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((8,), ("data",), axis_types=axis_types)
    task = dataclasses.replace(TASK, optimizer=optax.lbfgs(), data=[BATCH] * 2)
    layout = tekoa.Layout(mesh, optimizer_rules="data")
    model = tekoa.as_model_fns(init, apply)
    options = {"n_steps": 2, "n_steps_per_checkpoint": 2, "layout": layout}
    if kind == "Auto":
        loss = float(tekoa.TrainLoop(model, task, **options).next_checkpoint().loss)
        assert np.isfinite(loss)
    else:
        with pytest.raises(LayoutError, match="L-BFGS cannot run on arrays that are split"):
            tekoa.TrainLoop(model, task, **options)
