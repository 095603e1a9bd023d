import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import NonFiniteError, TrainLoop, TrainTask, testing
from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps

N = 140


def poison(line, *places):
    data = [tuple(np.array(a) for a in batch) for batch in line.data(N)]
    for place in places:
        data[place][0][:] = np.nan
    return data


def run_guarded(line, data, on_nan):
    """Runs all steps one by one, each with its guard."""
    fns, tx = model_fns(line.params, line.apply), optax.adam(0.1)
    state = steps.init_state(fns, tx, jax.random.key(0), inputs=(data[0][0],))
    step = jax.jit(steps.make_train_step(fns, line.mse, tx, on_nan=on_nan))
    for batch in data:
        state, _ = step(state, batch)
    return state


def learned(state):
    return state.params, state.opt_state, state.step


# Around the steps at which unguarded steps are verified, and the last step, which is guarded.
PLACES = [(0,), (63,), (64,), (65, 66), (3, 130), (138,), (139,), tuple(range(10, 135))]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("steps_per_dispatch", [1, 8])
def test_unguarded_steps_skip_what_guarded_steps_skip(line, places, steps_per_dispatch):
    data = poison(line, *places)
    loop = line.loop(
        data=data,
        tx=optax.adam(0.1),
        on_nan="skip",
        steps_per_dispatch=steps_per_dispatch,
        n_steps=N,
        n_steps_per_checkpoint=N,
    )
    last = loop.next_checkpoint()
    assert last.metrics["train"]["skipped_steps"] == len(places)
    testing.assert_trees_equal(learned(last.state), learned(run_guarded(line, data, "skip")))
    assert int(last.state.health.first_step) == places[0] + 1


# Every place with both numbers of steps per dispatch; each number with and without gradients.
@pytest.mark.parametrize(
    ("places", "grads", "steps_per_dispatch"),
    [(places, (i + n) % 2 == 0, n) for n in (1, 8) for i, places in enumerate(PLACES)],
)
def test_unguarded_steps_stop_where_guarded_steps_stop(line, places, grads, steps_per_dispatch):
    data = poison(line, *places)
    loop = line.loop(
        data=data,
        tx=optax.adam(0.1),
        steps_per_dispatch=steps_per_dispatch,
        n_steps=N,
        n_steps_per_checkpoint=N,
        grads=grads,
    )
    with pytest.raises(NonFiniteError, match=f"At step {places[0] + 1} the loss was nan"):
        loop.next_checkpoint()
    assert loop.step == places[0]
    testing.assert_trees_equal(learned(loop.state), learned(run_guarded(line, data, "stop")))


def test_count_continues_and_reports_bad_steps(line):
    loop = line.loop(data=poison(line, 5, 7), on_nan="count", n_steps=N, n_steps_per_checkpoint=N)
    assert loop.next_checkpoint().metrics["train"]["bad_steps"] == N - 5


@pytest.mark.parametrize("steps_per_dispatch", [1, 8])
def test_a_good_run_compiles_no_guarded_step(line, steps_per_dispatch):
    loop = line.loop(
        data=line.data(N),
        steps_per_dispatch=steps_per_dispatch,
        n_steps=N,
        n_steps_per_checkpoint=N,
    )
    loop.next_step()
    rollback = loop._runner._rollback
    loop.next_checkpoint()
    programs = {
        program: guarded for program, guarded in rollback._guarded.items() if guarded is not program
    }
    is_used = [program._cache_size() for program in programs]
    assert is_used == [1, int(steps_per_dispatch > 1)]
    assert [guarded._cache_size() for guarded in programs.values()] == [0, 0]


PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
GOOD = (np.ones((2, 2), np.float32), ())
# The root of zero is zero and its slope infinite: the loss stays finite, one gradient does not.
BAD_GRADIENT = (np.float32([[1, 1], [0, 1]]), ())
BAD_LOSS = (np.float32([[np.nan, 1], [1, 1]]), ())
# Finite gradients from which the optimizer below computes infinity.
LARGE = (np.float32([[1e9, 1], [1, 1]]), ())
CASES = {
    "all good": [GOOD] * 4,
    "a bad gradient": [GOOD, BAD_GRADIENT, GOOD, GOOD],
    "a bad loss": [GOOD, GOOD, GOOD, BAD_LOSS],
    "a bad update": [GOOD, GOOD, LARGE, GOOD],
    "bad from the start": [BAD_LOSS, BAD_GRADIENT, GOOD, BAD_LOSS],
}
# Has no state, so that only the parameters can stay bad.
OVERFLOWS = optax.stateless(lambda u, _: jax.tree.map(lambda g: -0.1 * g**5, u))


def train(batches, on_nan, *, steps_per_dispatch, tx=OVERFLOWS):
    """Returns the loop after all batches, and the error that ended it."""
    task = TrainTask(
        apply=lambda p, x: jnp.sum(p["a"] * x[0]) + jnp.sum(jnp.sqrt(p["b"] * x[1])),
        optimizer=tx,
        data=batches,
    )
    loop = TrainLoop(PARAMS, task, on_nan=on_nan, ema=0.5, steps_per_dispatch=steps_per_dispatch)
    try:
        list(loop)
    except NonFiniteError as error:
        return loop, str(error)
    return loop, ""


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("on_nan", ["stop", "skip", "ignore"])
def test_grouped_steps_compute_what_single_steps_compute(case, on_nan):
    # Another group and a last step follow the bad group: "stop" must stay where it was.
    batches = [*CASES[case], *[GOOD] * 5]
    (single, error), (grouped, same_error) = (
        train(batches, on_nan, steps_per_dispatch=n) for n in (1, 4)
    )
    records = [(s.params, s.average, s.step, s.health) for s in (single.state, grouped.state)]
    assert_close(*records)
    assert error == same_error
    assert bool(error) == (on_nan == "stop" and case != "all good")


def test_a_skipped_step_leaves_the_optimizer_state_unchanged():
    tx = optax.adam(0.01)
    good, _ = train([GOOD] * 4, "skip", steps_per_dispatch=1, tx=tx)
    skipped, _ = train([*CASES["a bad gradient"], GOOD], "skip", steps_per_dispatch=4, tx=tx)
    assert_close(
        (good.state.params, good.state.opt_state), (skipped.state.params, skipped.state.opt_state)
    )
