import types

import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.loop import placement, start
from tekoa.loop.task import Restored
from tekoa.loop.training import ModelTraining, Options


def apply(params, x):
    return x @ params["w"]


def init(rng, x):
    return {"w": jax.random.normal(rng, (x.shape[-1], 16))}


TASK = tekoa.TrainTask(optimizer=optax.adam(0.1), data=[], loss=lambda y, t: ((y - t) ** 2).mean())
BATCH = (np.ones((8, 4), np.float32), np.zeros((8, 16), np.float32))


def begin(layout=None, **options):
    place = placement.Placement(layout)
    training = ModelTraining(tekoa.as_model_fns(init, apply), TASK)
    options = {"batch": BATCH, "place": place, "options": Options(), **options}
    return start.starting_state(training, jax.random.key(1), **options)[0]


def test_a_state_is_made_in_its_shards_with_the_same_numbers():
    layout = tekoa.Layout(mesh=tekoa.make_mesh(fsdp=8), rules="fsdp")
    state, alone = begin(layout), begin()
    shapes = {shard.data.shape for shard in state.params["w"].addressable_shards}
    assert shapes == {(4, 2)}
    assert state.opt_state[0].mu["w"].sharding == state.params["w"].sharding
    np.testing.assert_array_equal(state.params["w"], alone.params["w"])


def test_a_reader_is_given_shapes_and_where_they_belong():
    given = []

    class Reader:
        target = None

        def restore(self, fresh):
            given.append(fresh)

    layout = tekoa.Layout(mesh=tekoa.make_mesh(fsdp=8), rules="fsdp")
    begin(layout, reader=Reader())
    (fresh,) = given
    assert isinstance(fresh.params["w"], jax.ShapeDtypeStruct)
    assert fresh.params["w"].sharding.spec == jax.P(None, "fsdp")


def test_a_batch_that_does_not_divide_is_an_error_at_once():
    layout = tekoa.Layout(mesh=tekoa.make_mesh(data=3))
    with pytest.raises(ValueError, match=r"8 rows does not divide among the 3 parts.*data=3"):
        begin(layout)


def test_steps_per_dispatch_as_asked_else_as_saved_else_one_among_processes():
    alone = types.SimpleNamespace(spans_processes=False)
    many = types.SimpleNamespace(spans_processes=True)
    saved = restored(8)
    assert start.settled_dispatch(2, saved, alone) == 2
    assert start.settled_dispatch("auto", saved, many) == 8
    assert start.settled_dispatch("auto", restored(None), alone) == "auto"
    assert start.settled_dispatch("auto", None, many) == 1


def restored(n):
    return types.SimpleNamespace(facts={"steps_per_dispatch": n})


@pytest.mark.parametrize(("on_nan", "n_bad"), [("stop", 0), ("skip", 1)])
def test_steps_skipped_by_an_earlier_run_do_not_stop_this_one(on_nan, n_bad):
    state = begin()
    one = jax.numpy.int32(1)
    skipped = state.replace(health=state.health._replace(n_bad=one, first_step=one))
    reader = types.SimpleNamespace(target=None, restore=lambda _: Restored(state=skipped))
    state = begin(reader=reader, options=Options(on_nan=on_nan))
    assert int(state.health.n_bad) == n_bad
