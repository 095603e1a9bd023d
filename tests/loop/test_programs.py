import jax
import numpy as np
import optax
import pytest

from tekoa import NonFiniteError, testing
from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps

N = 140


def poisoned(line, *places):
    data = [tuple(np.array(a) for a in batch) for batch in line.data(N)]
    for place in places:
        data[place][0][:] = np.nan
    return data


def guarded(line, data, on_nan):
    """All steps one by one, each with its guard."""
    fns, tx = model_fns(line.params, line.apply), optax.adam(0.1)
    state = steps.init_state(fns, tx, jax.random.key(0), inputs=(data[0][0],))
    step = jax.jit(steps.make_train_step(fns, line.mse, tx, on_nan=on_nan))
    for batch in data:
        state, _ = step(state, batch)
    return state


def parts(state):
    return state.params, state.opt_state, state.step


# Around the places where unguarded steps are looked at, and the last one, which is guarded.
PLACES = [(0,), (63,), (64,), (65, 66), (3, 130), (138,), (139,), tuple(range(10, 135))]


@pytest.mark.parametrize("places", PLACES)
def test_steps_without_a_guard_skip_what_guarded_ones_skip(line, places):
    data = poisoned(line, *places)
    loop = line.loop(
        data=data,
        tx=optax.adam(0.1),
        on_nan="skip",
        steps_per_dispatch=1,
        n_steps=N,
        n_steps_per_checkpoint=N,
    )
    last = loop.next_checkpoint()
    assert last.metrics["train"]["skipped_steps"] == len(places)
    testing.assert_trees_equal(parts(last.state), parts(guarded(line, data, "skip")))
    assert int(last.state.health.first_step) == places[0] + 1


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("grads", [True, False])
def test_steps_without_a_guard_stop_where_guarded_ones_stop(line, places, grads):
    data = poisoned(line, *places)
    loop = line.loop(
        data=data,
        tx=optax.adam(0.1),
        steps_per_dispatch=1,
        n_steps=N,
        n_steps_per_checkpoint=N,
        grads=grads,
    )
    with pytest.raises(NonFiniteError, match=f"At step {places[0] + 1} the loss was nan"):
        loop.next_checkpoint()
    assert loop.step == places[0]
    testing.assert_trees_equal(parts(loop.state), parts(guarded(line, data, "stop")))


def test_counting_goes_on_and_tells(line):
    loop = line.loop(data=poisoned(line, 5, 7), on_nan="count", n_steps=N, n_steps_per_checkpoint=N)
    assert loop.next_checkpoint().metrics["train"]["bad_steps"] == N - 5


def test_a_good_run_compiles_no_guarded_step(line):
    loop = line.loop(
        data=line.data(N), steps_per_dispatch=1, n_steps=N, n_steps_per_checkpoint=N, grads=False
    )
    loop.next_step()
    trial = loop._runner._trial
    loop.next_checkpoint()
    assert trial.free._cache_size() == 1
    assert trial._guarded._cache_size() == 0
